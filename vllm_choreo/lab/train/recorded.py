# SPDX-License-Identifier: Apache-2.0
"""Calls of a packed forward from a recorded workflow, placed as choreography places them."""

from __future__ import annotations

from vllm_choreo.errors import ChoreoError, UnknownMessageError
from vllm_choreo.lab.train.packing import PackedCall, SeenSpan
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.positions import resolve_offsets, resolve_span
from vllm_choreo.transcript.transcript import Transcript

TEXT_MODES = ("baseline", "exact")


def calls_of(transcript: Transcript) -> list[PackedCall]:
    """The calls of a transcript as if choreographed, whatever mode it was recorded in.

    In a run in mode "baseline" or "exact" the generated tokens are those of the text; places are
    those that the program asked for, which text ignores.

    Raises:
        UnknownMessageError: a call reads a message that the transcript lacks.
        ChoreoError: the transcript lacks offsets that its calls must have asked for.
    """
    numbers: dict[str, int] = {}
    calls: list[PackedCall] = []
    for step in transcript.steps:
        message = step.message
        call = _call_of(message, numbers, calls)
        _check_places(transcript, message, call)
        numbers[message.id] = len(calls)
        calls.append(call)
    return calls


def check_recorded_as_text(transcript: Transcript) -> None:
    """Check that a transcript has outputs, generated from text.

    Raises:
        ChoreoError: it was recorded in another mode than text, or nothing was generated.
    """
    if transcript.mode not in TEXT_MODES:
        raise ChoreoError(
            f"outputs to be learnt are those of a run in mode {' or '.join(TEXT_MODES)}; record "
            "the workflow in one of them",
            parameter="mode",
            value=transcript.mode,
        )
    if not transcript.decodes():
        raise ChoreoError(
            "a transcript without outputs teaches nothing; record a workflow that generates",
            parameter="transcript",
            value=transcript.workflow,
        )


def _call_of(message: Message, numbers: dict[str, int], calls: list[PackedCall]) -> PackedCall:
    spans = []
    for span in message.parents:
        if span.id not in numbers:
            raise UnknownMessageError(
                f"message {message.id!r} reads {span.id!r}, which no step before it made; record "
                "all calls of the program",
                parameter="parents",
                value=span.id,
            )
        number = numbers[span.id]
        num_tokens = len(calls[number].token_ids)
        spans.append((number, *resolve_span(span.start, span.stop, num_tokens, span.id)))
    lengths = [stop - start for _, start, stop in spans]
    offsets, new_offset = resolve_offsets(lengths, message.offsets, message.new_offset)
    return PackedCall(
        token_ids=message.token_ids,
        parents=tuple(SeenSpan(*span, at) for span, at in zip(spans, offsets, strict=True)),
        new_offset=new_offset,
        num_generated=len(message.generated_token_ids),
    )


def _check_places(transcript: Transcript, message: Message, call: PackedCall) -> None:
    """Check that a choreographed message stands where its call asked; old files lack offsets."""
    if transcript.mode == "choreo" and message.position != call.new_offset:
        raise ChoreoError(
            f"message {message.id!r} stands at {message.position}, but by what the transcript says "
            f"of it, it would at {call.new_offset}: its offsets were not recorded; record again",
            parameter="transcript",
            value=message.id,
        )
