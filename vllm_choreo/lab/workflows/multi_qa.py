# SPDX-License-Identifier: Apache-2.0
"""Multi-question answering: two questions, encoded independently, and one answer to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import assistant, user
from vllm_choreo.lab.workflows.sampling import Sampling
from vllm_choreo.lab.workflows.variants import check_variant, layout
from vllm_choreo.transcript.transcript import Step, Transcript

# Numbers and the opening are for small models, which otherwise answer one of the questions alone.
QUESTION = "Question {}: {}"
ASK = "Answer question 1 and question 2, each in one line."
OPENING = "1."


def multi_qa(
    c: Facade,
    questions: Sequence[str],
    *,
    variant: str = "serial",
    sampling_params: Sampling = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask two questions at once; see `vllm_choreo.lab.workflows`. One answer to both.

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
    one, two = (user(QUESTION.format(i, text)) for i, text in enumerate(questions, start=1))
    first = log.add("questions", "question 1", c.prefill(one, role="question"))
    context = [first] if variant == "baseline" else []
    second = log.add("questions", "question 2", c.prefill(two, parents=context, role="question"))
    answer = c.decode(
        user(ASK) + assistant(OPENING),
        **(layout(variant, first, second) | {"role": "answer"}),
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])
