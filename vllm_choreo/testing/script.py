# SPDX-License-Identifier: Apache-2.0
"""A workflow with given answers: its transcript without an engine, to be replayed on engines.

What a model takes to generate a token does not depend on which token it is. So where only times are
compared, answers of a given length will do, cut from a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_choreo.semantics.call_options import HasId, Named
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = Usage(exact=True, reused_tokens=0, repositioned_tokens=0, encoded_tokens=0)
_AT_ONCE = Metrics(submitted=0.0, waiting=None, ttft=0.0, latency=0.0)


class Script:
    """A `Facade` (vllm_choreo.api.protocol); every answer is a piece of a text.

    Args:
        tokenizer: tokenizer of the model.
        text: token ids, cut from another place for each answer; without digits, for a digit could
            be a vote.
        lengths: numbers of tokens of answers, by a word in the header.
    """

    mode = "script"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, text: list[int], lengths: Mapping[str, int]
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._lengths = lengths
        self._count = 0

    def prefill(self, tokens: Any, **options: Any) -> Any:
        """Return the message of a text, or a list of such."""
        if isinstance(tokens, str):
            return self._message(tokens, options.get("parents", ()), [])
        return [self._message(item["tokens"], item.get("parents", ()), []) for item in tokens]

    def decode(self, header: Any, **options: Any) -> Any:
        """Return the message of a header with its given answer, or a list of such."""
        if isinstance(header, str):
            return self._message(header, options["parents"], self._answer(header))
        return [
            self._message(item["header"], item["parents"], self._answer(item["header"]))
            for item in header
        ]

    def free(self, *messages: Named) -> None:
        """Do nothing: no message is kept."""

    def _answer(self, header: str) -> list[int]:
        (length,) = (length for word, length in self._lengths.items() if word in header)
        start = 37 * self._count % len(self._text)
        text = self._text[start:] + self._text[:start]
        return (text * (1 + length // len(text)))[:length]

    def _message(self, given: str, parents: Iterable[HasId], generated: list[int]) -> Message:
        self._count += 1
        said = self._tokenizer.decode(generated) if generated else ""
        token_ids = (*self._tokenizer.encode(given, add_special_tokens=False), *generated)
        return Message(
            id=f"script/{self._count}",
            text=given + said,
            token_ids=token_ids,
            num_tokens=len(token_ids),
            position=0,
            parents=tuple(ParentSpan(parent.id) for parent in parents),
            generated_text=said,
            generated_token_ids=tuple(generated),
            logprobs=None,
            finish_reason="length" if generated else None,
            usage=_NOTHING,
            metrics=_AT_ONCE,
        )
