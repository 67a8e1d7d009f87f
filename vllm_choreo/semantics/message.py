# SPDX-License-Identifier: Apache-2.0
"""`Message`: a caller's handle of a message, with the cost of its call. No torch, no vllm.

Keys and values stay in the engine: a `Message` is a handle with the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.provenance import Trace


@dataclass(frozen=True)
class Usage:
    """Tokens that a call read and wrote, by their source.

    Attributes:
        exact: the result is what an ordinary request on the concatenated text would give.
        reused_tokens: read from the cache (choreography: messages; baseline: vLLM's prefix cache).
        repositioned_tokens: part of `reused_tokens` that was seen at another position than the one
            at which it was encoded.
        encoded_tokens: tokens whose keys and values this call computed, generated ones included.
        repaired_tokens: tokens of the parents that were read as they are encoded in the call's own
            context, by `repair=`; computed for this call, or for an earlier one with the same.
        untrusted: it depends on keys and values that were loaded, and that nobody whom this process
            trusts has saved (docs/keep.md); then it is not exact.
    """

    exact: bool
    reused_tokens: int
    repositioned_tokens: int
    encoded_tokens: int
    repaired_tokens: int = 0
    untrusted: bool = False

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Usage:
        """Read the usage in a report of the engine, or in a record."""
        return cls(**{field.name: report.get(field.name, field.default) for field in fields(cls)})


@dataclass(frozen=True)
class Metrics:
    """The times of a call, in seconds.

    Attributes:
        submitted: time of submission, on the clock of `time.perf_counter`.
        waiting: time from submission until the engine first scheduled it. None where the engine did
            not say (it does if started with `disable_log_stats=False`) or had nothing to do.
        ttft, latency: time from submission to the first generated token, and to the end. For a
            prefill both are the time until it was encoded.
    """

    submitted: float
    waiting: float | None
    ttft: float
    latency: float


class TokenLogprob(Protocol):
    """Natural log-probability of a token, as `vllm.logprobs.Logprob`; `rank` 1: likeliest."""

    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int | None: ...

    @property
    def decoded_token(self) -> str | None: ...


@dataclass(frozen=True, eq=False)
class Message:
    """A message: a handle to cached keys and values, with its text. Compared by identity.

    Attributes:
        id: unique in the engine.
        text: the given text, then the generated one (special tokens left out, as vLLM does).
        token_ids: header and generated tokens, the end-of-sequence token included.
        num_tokens: `len(token_ids)`.
        position: position of the first token when the message was encoded.
        parents: the messages that it was encoded with, as they were listed.
        generated_text, generated_token_ids: output of decode; empty for a prefill.
        logprobs: logprobs of the generated tokens, as in vLLM's `CompletionOutput.logprobs`; None
            if not asked.
        prompt_logprobs: logprobs of the header's tokens, as in vLLM's
            `RequestOutput.prompt_logprobs`, None for the first one; None if not asked.
        finish_reason: "stop", "length" or "repetition"; None for a prefill.
        usage, metrics: tokens and times of its call.
        offsets, new_offset: positions at which the call placed its parents and its tokens; None:
            omitted, one after the other. Text has no such places, hence they count for
            nothing in baseline mode; but a program that is recorded there can be trained on as if
            it were choreographed.
        role: role in its workflow, as its call said; None: it did not.
        num_pictures: pictures that its call was given, among these tokens.
        trace: the history of its keys and values, from which `provenance` is read; None where the
            history is elsewhere: on a server, or lost with the engine (transcripts).
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    position: int
    parents: tuple[ParentSpan, ...]
    generated_text: str
    generated_token_ids: tuple[int, ...]
    logprobs: Sequence[Mapping[int, TokenLogprob]] | None
    finish_reason: str | None
    usage: Usage
    metrics: Metrics
    trace: Trace | None = None
    offsets: tuple[int | None, ...] | None = None
    new_offset: int | None = None
    role: str | None = None
    prompt_logprobs: Sequence[Mapping[int, TokenLogprob] | None] | None = None
    num_pictures: int = 0

    @property
    def num_prefilled(self) -> int:
        """Tokens that its call encoded before it generated any; 0 for a prefill of the baseline."""
        return max(0, self.usage.encoded_tokens - len(self.generated_token_ids))

    @property
    def provenance(self) -> frozenset[str]:
        """Ids of all messages that its keys and values carry traces of, itself left out.

        Freed ones are among them. In baseline mode a message is its text, and carries none, unless
        it is a copy: then it carries the text of the message copied.

        Raises:
            ChoreoError: the history is not here. A server is asked by `c.provenance(message)`.
        """
        if self.trace is None:
            raise ChoreoError(
                "the history of this message is not in this process: of a message on a server, ask "
                "for it by c.provenance(message)",
                parameter="message",
                value=self.id,
            )
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


@dataclass(frozen=True)
class Saved:
    """Counts of what a save has written.

    Attributes:
        messages: messages that can be loaded by their names.
        encodings: messages saved with keys and values.
        tokens: tokens of the messages.
        bytes: size of the keys and values; pictures take more.
    """

    messages: int
    encodings: int
    tokens: int
    bytes: int
