# SPDX-License-Identifier: Apache-2.0
"""Worker of a plan that gives every prompt the tokens that the text was answered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_choreo.engine import captured_logprobs
from vllm_choreo.planner import FacadeWorker
from vllm_choreo.planner.workers.worker import Answer, ReadMessage


class ForcedWorker(FacadeWorker):
    """A worker that notes the tokens of answers, and forces those that it is given.

    Args:
        facade: `Choreography` on an engine in this process that forces tokens.
        said: token ids of each prompt's answer, by the prompt's text; None: the model answers.
        options: arguments of `FacadeWorker`.

    Attributes:
        answered: token ids of each prompt's answer.
        exact: whether each prompt's call was exact.
        distributions: of forced answers, natural log-probabilities, float32 [num_tokens, vocab].
    """

    def __init__(
        self, facade: Any, said: Mapping[str, Sequence[int]] | None = None, **options: Any
    ) -> None:
        super().__init__(facade, **options)
        self.answered: dict[str, tuple[int, ...]] = {}
        self.exact: dict[str, bool] = {}
        self.distributions: dict[str, np.ndarray] = {}
        self._said = said

    async def decode(
        self, header: str, parents: Sequence[ReadMessage], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer:
        prompt = "".join(map(_text, parents)) + header
        if self._said is None:
            answer = await super().decode(header, parents, exact, sampling)
        else:
            name = f"{id(self)}/{len(self.distributions)}/{prompt}"
            forced = {"forced_tokens": list(self._said[prompt])}
            more = {"extra_args": {**forced, **captured_logprobs.expect(name)}}
            try:
                answer = await super().decode(header, parents, exact, {**sampling, **more})
            finally:
                found = captured_logprobs.take(name)
            self.distributions[prompt] = found
        assert answer.message is not None
        self.answered[prompt] = tuple(answer.message.generated_token_ids)  # type: ignore[attr-defined]
        self.exact[prompt] = answer.exact
        return answer


def _text(read: ReadMessage) -> str:
    """Text of a parent; of a span, which is that of an answer, what was generated."""
    message: Any = read[0] if isinstance(read, tuple) else read
    return str(message.generated_text if isinstance(read, tuple) else message.text)
