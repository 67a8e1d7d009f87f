# SPDX-License-Identifier: Apache-2.0
"""Replay: a workflow again, in any mode, generating the tokens of a recorded run.

    recorded = tree_of_thoughts(baseline, question, sampling_params=params)
    with Replay(choreo, recorded) as c:
        again = tree_of_thoughts(c, question, sampling_params=params)

Both runs read and write the same tokens, so their times, their costs and the logprobs of their
tokens can be compared. The engine must have been started with
`logits_processors=["vllm_choreo.engine.worker.forced:ForcedTokens"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call_options import Content
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Transcript

if TYPE_CHECKING:
    from vllm import SamplingParams


class Replay(FacadeWrapper):
    """A `Facade` that hands every call to `c`, with forced tokens.

    Args:
        c: a facade, in any mode.
        transcript: a run of the same program, with the same inputs. Who reads whom is not
            compared: a variant of a workflow that differs in that alone can be replayed.

    As a context manager it checks at the end that all recorded calls were made. It does not close
    `c`. A call that was not recorded, and an engine that does not know forced tokens, raise
    ChoreoError.
    """

    def __init__(self, c: Facade, transcript: Transcript) -> None:
        super().__init__(c)
        self._recorded = [step.message for step in transcript.steps]
        self._count = 0

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        self._next("prefill", calls)
        return super()._prefill(calls)

    def _decode(self, calls: list[Item]) -> list[Message]:
        """Force the recorded tokens; of the sampling parameters only those of the output count."""
        recorded = self._next("decode", calls)
        made = super()._decode(
            [
                {**call, "sampling_params": _forcing(message, call.get("sampling_params"))}
                for call, message in zip(calls, recorded, strict=True)
            ]
        )
        return [
            _forced(message, expected) for message, expected in zip(made, recorded, strict=True)
        ]

    def finish(self) -> None:
        """Check that the program made all recorded calls.

        Raises:
            ChoreoError: calls were recorded that it did not make.
        """
        left = len(self._recorded) - self._count
        if left:
            raise _differs(f"the program ended {left} calls before the recorded one")

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.finish()

    def _next(self, kind: str, items: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The recorded messages of the next calls, which must be `items`."""
        recorded = self._recorded[self._count : self._count + len(items)]
        if len(recorded) < len(items):
            raise _differs(f"the program makes more than the {len(self._recorded)} recorded calls")
        for item, message in zip(items, recorded, strict=True):
            given = item["header"] if "header" in item else item["tokens"]
            is_decode = bool(message.generated_token_ids)
            if is_decode != (kind == "decode") or not _begins(message, given):
                raise _differs(f"call {self._count + 1} was not this {kind}", given)
            self._count += 1
        return recorded


def _begins(message: Message, given: Content) -> bool:
    """Return whether the message is `given`, text or token ids, and its generated part."""
    if isinstance(given, str):
        return message.text == given + message.generated_text
    return message.token_ids == (*given, *message.generated_token_ids)


def _forcing(recorded: Message, asked: SamplingParams | None) -> SamplingParams:
    """Sampling parameters under which a call generates what was recorded."""
    from vllm import SamplingParams

    tokens = list(recorded.generated_token_ids)
    reported = {} if asked is None else {
        name: getattr(asked, name)
        for name in ("logprobs", "skip_special_tokens", "spaces_between_special_tokens")
    }  # fmt: skip
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(tokens),
        ignore_eos=True,
        extra_args={"forced_tokens": tokens},
        **reported,
    )


def _forced(message: Message, recorded: Message) -> Message:
    """The message with the text of the recorded one, whose tokens it has."""
    if message.generated_token_ids != recorded.generated_token_ids:
        raise ChoreoError(
            "the engine did not generate the recorded tokens: start it with the same model and "
            'logits_processors=["vllm_choreo.engine.worker.forced:ForcedTokens"]',
            parameter="transcript",
            value=message.generated_text,
        )
    return replace(message, text=recorded.text, generated_text=recorded.generated_text)


def _differs(reason: str, value: object = None) -> ChoreoError:
    return ChoreoError(
        f"{reason}: replay the same workflow with the same inputs",
        parameter="transcript",
        value=value,
    )
