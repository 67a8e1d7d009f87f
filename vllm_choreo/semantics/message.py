# SPDX-License-Identifier: Apache-2.0
"""What the client knows of a call and of the message that it makes. No torch, no vllm.

A `Call` is one validated call; `Outcome` is what the engine answered; `message_from` makes the
`Message` of both. Keys and values stay in the engine: a `Message` is a handle with the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_choreo.errors import ChoreoError, error_from_report
from vllm_choreo.semantics.params import ChoreoParams, ParentSpan
from vllm_choreo.semantics.provenance import Trace

_NO_TRACE = Trace("")  # of a message that no session made


@dataclass(frozen=True)
class Usage:
    """Where the tokens that a call read and wrote came from, in tokens.

    Attributes:
        exact: the result is what an ordinary request on the concatenated text would give.
        reused_tokens: read from the cache (choreography: messages; baseline: vLLM's prefix cache).
        repositioned_tokens: those of `reused_tokens` that were seen at another position than the
            one at which they were encoded.
        encoded_tokens: whose keys and values were computed for this call, generated ones included.
    """

    exact: bool
    reused_tokens: int
    repositioned_tokens: int
    encoded_tokens: int


@dataclass(frozen=True)
class Metrics:
    """The times of a call, in seconds.

    Attributes:
        submitted: when it was submitted, on the clock of `time.perf_counter`.
        waiting: from then until the engine first scheduled it. None where the engine did not say
            (it does if started with `disable_log_stats=False`) or had nothing to do.
        ttft, latency: from then to the first generated token, and to the end. For a prefill both
            are the time until it was encoded.
    """

    submitted: float
    waiting: float | None
    ttft: float
    latency: float


@dataclass(frozen=True, eq=False)
class Message:
    """A message: a handle to cached keys and values, with its text. Compared by identity.

    Attributes:
        id: unique in the engine.
        text: what was given, then what was generated (special tokens left out, as vLLM does).
        token_ids: header and generated tokens, the end-of-sequence token included.
        num_tokens: `len(token_ids)`.
        position: position of the first token when the message was encoded.
        parents: the messages that it was encoded with, as they were listed.
        generated_text, generated_token_ids: what decode sampled; empty for a prefill.
        logprobs: as vLLM's `CompletionOutput.logprobs`, of the generated tokens; None if not asked.
        finish_reason: "stop", "length" or "repetition"; None for a prefill.
        usage, metrics: see `Usage`, `Metrics`.
        trace: the history of its keys and values, from which `provenance` is read.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    position: int
    parents: tuple[ParentSpan, ...]
    generated_text: str
    generated_token_ids: tuple[int, ...]
    logprobs: Any
    finish_reason: str | None
    usage: Usage
    metrics: Metrics
    trace: Trace = _NO_TRACE

    @property
    def provenance(self) -> frozenset[str]:
        """Ids of all messages that its keys and values carry traces of, itself left out.

        Freed ones are among them. In baseline mode a message is its text, and carries none, unless
        it is a copy: then it carries the text of the message copied.
        """
        return self.trace.closure()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else self.text[:40] + "…"
        return f"Message({self.id!r}, {self.num_tokens} tokens at {self.position}, {text!r})"


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer: what is new since the last piece.

    Attributes:
        text, token_ids: the new text and its tokens; a token may add no text yet.
        message: the whole message, on the last piece alone.
    """

    text: str
    token_ids: tuple[int, ...]
    message: Message | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One validated call, before it is submitted.

    Attributes:
        text, token_ids: the new tokens, and their text.
        params: what the engine is told; `params.save_as` is the message's id.
        sampling_params: the caller's for decode, None for prefill.
        trace: what the message that it makes will carry traces of.
    """

    text: str
    token_ids: tuple[int, ...]
    params: ChoreoParams
    sampling_params: Any
    trace: Trace

    @property
    def id(self) -> str:
        assert self.params.save_as is not None
        return self.params.save_as

    @property
    def is_decode(self) -> bool:
        return self.params.kind == "decode"


@dataclass(frozen=True)
class Outcome:
    """The last `RequestOutput` of a call and its times."""

    output: Any
    metrics: Metrics


def metrics_of(output: Any, submitted: float, first: float, now: float) -> Metrics:
    """The times of a call.

    Args:
        output: its latest `RequestOutput`.
        submitted, first, now: when it was submitted, when the first of its outputs came, and this
            one; on the clock of `time.perf_counter`.
    """
    # The engine core's stamps are `time.monotonic`: on Linux the clock of `time.perf_counter`, in
    # every process.
    scheduled = output.metrics.scheduled_ts if output.metrics is not None else 0.0
    return Metrics(
        submitted=submitted,
        waiting=max(0.0, scheduled - submitted) if scheduled else None,
        ttft=first - submitted,
        latency=now - submitted,
    )


def report_of(outcome: Outcome) -> Mapping[str, Any] | ChoreoError:
    """The engine's report on a finished call: its numbers, or why it was refused."""
    params = outcome.output.kv_transfer_params or {}
    if "choreo_error" in params:
        return error_from_report(params["choreo_error"])
    if "choreo" in params:
        report: Mapping[str, Any] = params["choreo"]
        return report
    reason = outcome.output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        return ChoreoError(f"the engine ended the call: {reason}", parameter="finish_reason")
    return ChoreoError(
        "the engine does not choreograph: start it with the vllm_choreo plugin "
        "(see the README), or use mode='baseline'",
        parameter="llm",
    )


def message_from(
    call: Call,
    outcome: Outcome,
    report: Mapping[str, Any],
) -> Message:
    """The message that `call` made.

    Args:
        call: the call as it was planned.
        outcome: of the call.
        report: `position`, `exact`, `reused_tokens`, `repositioned_tokens`, `encoded_tokens`.
    """
    completion = outcome.output.outputs[0]
    # The one token that the engine samples after a prefill is no part of the message.
    generated = tuple(completion.token_ids) if call.is_decode else ()
    generated_text = completion.text if call.is_decode else ""
    token_ids = (*call.token_ids, *generated)
    return Message(
        id=call.id,
        text=call.text + generated_text,
        token_ids=token_ids,
        num_tokens=len(token_ids),
        position=report["position"],
        parents=call.params.parents,
        generated_text=generated_text,
        generated_token_ids=generated,
        logprobs=completion.logprobs if call.is_decode else None,
        finish_reason=completion.finish_reason if call.is_decode else None,
        usage=Usage(
            exact=report["exact"],
            reused_tokens=report["reused_tokens"],
            repositioned_tokens=report["repositioned_tokens"],
            encoded_tokens=report["encoded_tokens"],
        ),
        metrics=outcome.metrics,
        trace=call.trace,
    )
