# SPDX-License-Identifier: Apache-2.0
"""The demo's first comparison: one text, two readers with roles of their own, within seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_choreo.lab.workflows.chat import assistant, system, user

if TYPE_CHECKING:
    from vllm_choreo.cli.engine import Engine
    from vllm_choreo.semantics.message import Message

ANSWER_TOKENS = 32
WIDTH = 80
_TITLES = {"baseline": "as text", "choreo": "choreographed"}
_END = "<|im_end|>"
_INTRODUCTION = "One text, read by two readers with roles of their own. The second one's answer:"


def compare_first(engine: Engine, text: str, roles: Sequence[str]) -> dict[str, Message]:
    """Have a text read by two readers, after roles of their own, and keep the second one's answer.

    As text the second prompt begins with another role, so nothing of the first is found again;
    choreographed, the text was encoded once.

    Args:
        engine: the engine.
        text: the text, which ends with a question.
        roles: two system prompts.

    Returns:
        For each mode the second reader's answer.
    """
    answers = {}
    # Not `ignore_eos`: these answers are read, and not compared in time from end to end.
    params = engine.sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, skip_special_tokens=False)
    for mode in _TITLES:
        with engine.open(mode) as c:
            read = c.prefill(user(text))
            for role in roles:
                reader = c.prefill(system(role))
                answer = c.decode(assistant(), parents=[reader, read], sampling_params=params)
            answers[mode] = answer
    return answers


def comparison_text(answers: Mapping[str, Message]) -> str:
    """The comparison as lines of at most 80 columns.

    Args:
        answers: for each mode the second reader's answer.
    """
    lines = textwrap.wrap(_INTRODUCTION, WIDTH)
    for mode, title in _TITLES.items():
        answer = answers[mode]
        computed = f"{answer.usage.encoded_tokens:,} tokens computed"
        lines.append(
            f"\n{title}: first token after {answer.metrics.ttft * 1000:,.0f} ms, {computed}"
        )
        said = " ".join(answer.generated_text.partition(_END)[0].split())
        lines += textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)
