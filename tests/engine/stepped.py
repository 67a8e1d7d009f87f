# SPDX-License-Identifier: Apache-2.0
"""Calls on an engine in this process that is stepped by hand: what meets in one step is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.oracle import Oracle, Parent, assert_choices
from vllm_choreo.engine.utility import call
from vllm_choreo.semantics.params import ChoreoParams


@dataclass
class Stepped:
    """Calls of one session and what became of them.

    Attributes:
        session: whose messages they make.
        outputs: of the requests that ended, by name.
    """

    llm: Any
    session: str = "s"
    outputs: dict[str, Any] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        kind: str = "prefill",
        num_tokens: int = 1,
        **options: Any,
    ) -> None:
        """Send a call that makes the message `name`; it runs when the engine is stepped."""
        params = ChoreoParams(session=self.session, save_as=name, kind=kind, **options)
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1
        )
        prompt = {"prompt_token_ids": list(tokens)}
        self.llm.llm_engine.add_request(name, prompt, params.apply(sampling))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.outputs[output.request_id] = output

    def finish(self, max_steps: int = 1000) -> None:
        """Step until all is answered, which must not take more than `max_steps`."""
        for _ in range(max_steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"not answered after {max_steps} steps")

    def make(self, name: str, tokens: Sequence[int], **options: Any) -> None:
        """Make a message, alone."""
        self.submit(name, tokens, **options)
        self.finish()
        assert self.error(name) is None

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def operate(self, operation: str, *args: Any) -> Any:
        """An operation on the session, between steps."""
        return call(self.llm, operation, self.session, *args)

    def error(self, name: str) -> dict[str, str] | None:
        """The report of the error with which a call ended, if it did."""
        return (self.outputs[name].kv_transfer_params or {}).get("choreo_error")

    def generated(self, name: str) -> tuple[list[int], list[float]]:
        """The tokens of an answer, and the log-probability of each."""
        (output,) = self.outputs[name].outputs
        logprobs = [at[t].logprob for t, at in zip(output.token_ids, output.logprobs, strict=True)]
        return list(output.token_ids), logprobs

    def close(self) -> None:
        self.operate("close")
        self.step()  # what was queued for the next step is done


def assert_says(
    stepped: Stepped, name: str, oracle: Oracle, header: Sequence[int], parents: Sequence[Parent]
) -> None:
    """An answer behind its parents is what the oracle gives, each token the most likely one."""
    tokens, logprobs = stepped.generated(name)
    ends = [parent.offset + parent.stop - parent.start for parent in parents]
    encoded = oracle.encode([*header, *tokens], parents, max(ends, default=0))
    assert_choices(encoded, len(header))
    expected = encoded.logprobs()[len(header) - 1 : -1]
    for row, token, logprob in zip(expected, tokens, logprobs, strict=True):
        assert abs(float(row[token]) - logprob) < LOGPROB_TOLERANCE
