# SPDX-License-Identifier: Apache-2.0
"""The benchmark of prompts from schemas without an engine: its schemas, and its bar."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pml import answers, bars, texts
from vllm_choreo.pml.language.structure import check_documents


class Letters:
    """A tokenizer of characters."""

    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(map(ord, text))


@pytest.mark.parametrize("task", answers.TASKS, ids=lambda task: task.name)
def test_the_schemas_of_problems_take_their_prompts(task: answers.Task) -> None:
    for number, problem in enumerate(task.make(3, answers.SEED)):
        schema = texts.problem_schema(problem, f"p{number}")
        check_documents([schema, texts.problem_prompt(problem, schema.name)])
        assert len(texts.without_scaffolds(schema).children) == 1 + len(problem.documents)


def test_long_documents_have_the_length_that_is_asked_for_and_differ() -> None:
    one, other = (texts.long_text(Letters(), 2000, seed) for seed in (1, 2))
    assert one != other and all(1500 < len(text) <= 2000 for text in (one, other))
    schema = texts.long_schema("long", one)
    check_documents([schema, texts.long_prompt("long", texts.NUM_ROLES - 1)])


def test_ratios_decide_whether_the_bar_is_reached() -> None:
    def row(tokens: int, side: str, seconds: float) -> dict[str, Any]:
        cells = {"document_tokens": tokens, "in_flight": 1, "side": side, "median_s": seconds}
        return {key: str(value) for key, value in cells.items()}

    rows = [row(5000, "text", 10.0), row(5000, "cached", 0.08), row(300, "text", 1.0)]
    rows.append(row(300, "cached", 0.1))
    assert bars.ratio(rows, 5000) == pytest.approx(125)
    assert bars.bar_reached(rows), "short documents have no bar"
    assert not bars.bar_reached([*rows, row(8000, "text", 1.0), row(8000, "cached", 0.1)])
    assert bars.bar_reached([])
