# SPDX-License-Identifier: Apache-2.0
"""Multi-question answering: two questions, encoded independently, and one answer to both.

In the layout "paper" a system text is every question's parent, and nothing is asked behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling
from vllm_choreo.lab.workflows.variants import (
    check_layout,
    check_variant,
    side_by_side,
    with_layout,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

# Numbers and the opening are for small models, which otherwise answer one of the questions alone.
QUESTION = "Question {}: {}"
ASK = "Answer question 1 and question 2, each in one line."
OPENING = "1."
SYSTEM = "Answer all questions."


def multi_qa(
    c: Facade,
    questions: Sequence[str],
    *,
    variant: str = "serial",
    layout: str = "standard",
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask two questions at once; see `vllm_choreo.lab.workflows`. One answer to both.

    Args:
        questions: two.
        variant: "baseline", "serial" or "parallel": see `variants`.
        layout: "standard" or "paper": see `variants`.

    Raises:
        ChoreoError: no such variant or layout, or other than two questions.
    """
    check_variant(variant)
    check_layout(layout)
    if len(questions) != 2:
        raise ChoreoError("must be two", parameter="questions", value=list(questions))
    inputs = {"questions": list(questions), "variant": variant, "sampling_params": sampling_params}
    c, chat, log = open_chat("multi_qa", c, with_layout(inputs, layout), turns, on_step)
    before: list[Message] = []
    header = chat.user(ASK) + chat.assistant(OPENING)
    if layout == "paper":
        system = c.prefill(chat.system(SYSTEM), role="system")
        before, header = [log.add("system", "system", system)], chat.answer_alone()
    one, two = (chat.user(QUESTION.format(i, text)) for i, text in enumerate(questions, start=1))
    first = log.add("questions", "question 1", c.prefill(one, parents=before, role="question"))
    context = [*before, first] if variant == "baseline" else before
    second = log.add("questions", "question 2", c.prefill(two, parents=context, role="question"))
    answer = c.decode(
        header,
        **(side_by_side(variant, first, second, before) | {"role": "answer"}),
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])
