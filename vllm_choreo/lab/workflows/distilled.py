# SPDX-License-Identifier: Apache-2.0
"""A run of a workflow as one direct call: the question, and the answer that the workflow came to.

A model trained on such calls shows whether the workflow is needed when it is used (Bai & Eisner,
*Prompt Choreography*, section 4.1, "distilled baseline").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import CHATML, turns_of
from vllm_choreo.lab.workflows.direct import question_of
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.transcript.transcript import Transcript


def as_direct(transcript: Transcript, encode: Callable[[str], Sequence[int]]) -> Transcript:
    """The run of `direct` that says what a workflow's run came to; of several answers the first.

    Args:
        transcript: a run of the workflow.
        encode: text to token ids, without special tokens added.

    Raises:
        ChoreoError: the workflow has no one question, or its answer is no single call's.
    """
    question = question_of(transcript.workflow, transcript.inputs)
    opening = transcript.inputs.get("opening", "")
    chat = turns_of(transcript.inputs.get("turns"))
    header = chat.user(question) + chat.assistant(opening)
    answer = _answer_of(transcript)
    inputs: dict[str, Any] = {"question": question, "opening": opening}
    if chat != CHATML:
        inputs["turns"] = chat.to_json()
    log = Transcript("direct", transcript.mode, inputs)
    start: list[Message] = []
    if chat.start:
        given = _message("0", chat.start, encode(chat.start), log.start)
        start.append(log.add("start", "start", given))
    made = _message(str(len(start)), header, encode(header), log.start, answer, start)
    log.add("answer", "answer", made)
    return log.finish([answer.generated_text])


def _message(
    name: str,
    text: str,
    token_ids: Sequence[int],
    submitted: float,
    answer: Message | None = None,
    parents: Sequence[Message] = (),
) -> Message:
    """A message of the text, and of what `answer` has generated."""
    said = "" if answer is None else answer.generated_text
    generated = () if answer is None else answer.generated_token_ids
    tokens = (*token_ids, *generated)
    return Message(
        id=name,
        text=text + said,
        token_ids=tokens,
        num_tokens=len(tokens),
        position=sum(parent.num_tokens for parent in parents),
        parents=tuple(ParentSpan(parent.id) for parent in parents),
        generated_text=said,
        generated_token_ids=generated,
        logprobs=None,
        finish_reason=None if answer is None else answer.finish_reason,
        usage=Usage(True, 0, 0, len(tokens)),
        metrics=Metrics(submitted, None, 0.0, 0.0),
    )


def _answer_of(transcript: Transcript) -> Message:
    """The last message that says the first answer."""
    for step in reversed(transcript.decodes()):
        if transcript.answers[:1] == (step.message.generated_text,):
            return step.message
    raise ChoreoError(
        "no call has generated the answer as it is given, so no one call could learn it",
        parameter="transcript",
        value=transcript.workflow,
    )
