# SPDX-License-Identifier: Apache-2.0
"""The frontier of repair: what it measures, and what it draws from that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontier import picture, points, rules, tasks
from benchmarks.frontier.measure import Reader
from benchmarks.harness.engine import FORCED

BUDGETS = (0.25, 0.6)


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], embedded_model_path: Path) -> Any:
    return engine_slot(
        embedded_model_path,
        max_model_len=4096,
        max_num_seqs=32,
        num_gpu_blocks_override=800,
        logits_processors=[FORCED],
        additional_config={"choreo": {"hidden_memory_gib": 0.25}},
    )


@pytest.mark.exhaustive
def test_every_rule_is_measured_against_the_text(
    llm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (reading,) = tasks.look_ups(1)
    reader = Reader(llm, reading, BUDGETS, 0)
    rows = list(reader.rows())
    found = {(row["rule"], row["budget"]): row for row in rows}
    none, everything = found["none", 0.0], found["all", 1.0]
    assert none["kl"] > 1e-3 and everything["kl"] < 1e-5 and everything["same"]
    assert len(found) == 2 + len(rules.RULES) * len(BUDGETS) + 3
    for (rule, budget), row in found.items():
        if rule in ("first", "last", "random"):
            assert row["charged"] == pytest.approx(budget, abs=0.05)
        elif rule in rules.RULES:
            assert budget < row["charged"] < budget + 0.1 or rule.endswith("layers")

    reader.close()

    monkeypatch.setattr("benchmarks.harness.pictures.RESULTS", tmp_path)
    told = [
        {**{name: str(value) for name, value in row.items()}, "task": "look-up", "problem": "0"}
        for row in rows
    ]
    found_points = points.points_of(told)["look-up"]
    mean, low, high = points.against_first(found_points, ("first", 0.25))
    assert abs(mean) < 1e-9 and low <= mean <= high, "no better than itself"
    picture.draw({"look-up": found_points}, "frontier")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


@pytest.mark.parametrize("name", tasks.TASKS)
def test_tasks_are_the_same_in_every_run_and_have_answers(name: str) -> None:
    made = tasks.TASKS[name](3)
    assert made == tasks.TASKS[name](3) and len(set(map(repr, made))) == 3
    for reading in made:
        assert reading.documents or len(reading.thoughts) == 5
        assert all(text.endswith("<|im_end|>\n") for text in reading.documents)
        text = "".join(reading.documents)
        assert reading.answer is None or all(word in text for word in reading.answer.split())
