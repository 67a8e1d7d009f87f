# SPDX-License-Identifier: Apache-2.0
"""A run of a workflow as one direct call: the question, and the answer that the workflow came to.

A model trained on such calls shows whether the workflow is needed when it is used (Bai & Eisner,
*Prompt Choreography*, section 4.1, "distilled baseline").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import assistant, user
from vllm_choreo.lab.workflows.direct import question_of
from vllm_choreo.semantics.message import Message, Metrics, Usage
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
    header = user(question) + assistant(opening)
    answer = _answer_of(transcript)
    token_ids = (*encode(header), *answer.generated_token_ids)
    log = Transcript("direct", transcript.mode, {"question": question, "opening": opening})
    message = Message(
        id="0",
        text=header + answer.generated_text,
        token_ids=token_ids,
        num_tokens=len(token_ids),
        position=0,
        parents=(),
        generated_text=answer.generated_text,
        generated_token_ids=answer.generated_token_ids,
        logprobs=None,
        finish_reason=answer.finish_reason,
        usage=Usage(True, 0, 0, len(token_ids)),
        metrics=Metrics(log.start, None, 0.0, 0.0),
    )
    log.add("answer", "answer", message)
    return log.finish([answer.generated_text])


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
