# SPDX-License-Identifier: Apache-2.0
"""Multi-question answering: two questions, encoded independently, and one answer to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.workflows.chat import assistant, user
from vllm_choreo.workflows.record.transcript import Step, Transcript
from vllm_choreo.workflows.variants import check_variant, layout

ASK = "Answer both questions, each in one line."


def multi_qa(
    c: Facade,
    questions: Sequence[str],
    *,
    variant: str = "serial",
    sampling_params: Any = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask two questions at once; see `vllm_choreo.workflows`. One answer to both.

    Args:
        questions: two.
        variant: "baseline", "serial" or "parallel": see `variants`.

    Raises:
        ChoreoError: no such variant, or other than two questions.
    """
    check_variant(variant)
    if len(questions) != 2:
        raise ChoreoError("must be two", parameter="questions", value=list(questions))
    inputs = {"questions": list(questions), "variant": variant, "sampling_params": sampling_params}
    log = Transcript("multi_qa", c.mode, inputs, on_step)
    one, two = questions
    first = log.add("questions", "question 1", c.prefill(user(one)))
    context = [first] if variant == "baseline" else []
    second = log.add("questions", "question 2", c.prefill(user(two), parents=context))
    answer = c.decode(
        user(ASK) + assistant(), **layout(variant, first, second), sampling_params=sampling_params
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])
