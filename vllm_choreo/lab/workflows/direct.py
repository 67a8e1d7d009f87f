# SPDX-License-Identifier: Apache-2.0
"""Direct: one call, an ordinary request. The control of the other workflows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.problems.words import concepts_question
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.multi_qa import ASK
from vllm_choreo.lab.workflows.sampling import Sampling
from vllm_choreo.transcript.transcript import Step, Transcript


def direct(
    c: Facade,
    question: str,
    *,
    opening: str = "",
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask `question` once; see `vllm_choreo.lab.workflows`.

    Args:
        opening: how the answer begins, for models too small to find its form by themselves.
    """
    inputs = {"question": question, "opening": opening, "sampling_params": sampling_params}
    c, chat, log = open_chat("direct", c, inputs, turns, on_step)
    answer = c.decode(
        chat.user(question) + chat.assistant(opening),
        role="answer",
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])


def question_of(workflow: str, inputs: Mapping[str, Any]) -> str:
    """All that a workflow is given, as one question.

    Args:
        workflow: its name.
        inputs: the arguments of its function.

    Raises:
        ChoreoError: the workflow has no one question that a call could answer.
    """
    if "question" in inputs:
        return "\n\n".join([*inputs.get("documents", ()), inputs["question"]])
    if "questions" in inputs:
        return "\n\n".join([*inputs["questions"], ASK])
    if "concepts" in inputs:
        return concepts_question(inputs["concepts"])
    raise ChoreoError(
        "there is no one question that a direct call could answer: take another workflow",
        parameter="workflow",
        value=workflow,
    )
