# SPDX-License-Identifier: Apache-2.0
"""Plans and texts that are compared say the same tokens, and differ where choreography may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.distributions import ENGINE_OPTIONS
from benchmarks.planner.agreement.measure import compare_calls, compare_results, run_plan
from benchmarks.planner.agreement.tables import TABLES
from benchmarks.planner.rivals.workloads import workload

NUM_TOKENS = 4
# Sums over a vocabulary in float32, of calls that attend to the same keys in another batch.
KL_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], shallow_model_path: Path) -> Any:
    return engine_slot(shallow_model_path, max_model_len=1024, **ENGINE_OPTIONS)


@pytest.mark.parametrize("name", ["debate", "critics"])
def test_calls_are_compared_at_the_tokens_of_the_text(llm: Any, name: str) -> None:
    batch = workload(name, 2, NUM_TOKENS, 20).batch
    text, results = run_plan(llm, batch, "baseline")
    assert not text.distributions and all(text.exact.values())
    forced, same = run_plan(llm, batch, "baseline", text.answered)
    assert forced.answered == text.answered and same == results
    for prompt, one in forced.distributions.items():
        assert list(one.argmax(axis=1)) == list(text.answered[prompt]), "greedy is what was forced"
    for rule in (None, "first:2"):
        rows = compare_calls(llm, batch, text.answered, rule)
        assert len(rows) == len(text.answered)
        assert sum(row["tokens"] for row in rows) == sum(map(len, text.answered.values()))
        for row in rows:
            is_same = row["first"] == row["tokens"]
            assert is_same == (row["top1"] == 1)
            if row["exact"]:
                assert row["kl"] < KL_TOLERANCE and is_same, row
        inexact = [row for row in rows if not row["exact"]]
        assert inexact and max(row["kl"] for row in inexact) > KL_TOLERANCE


def test_results_of_a_plan_that_answers_freely(llm: Any) -> None:
    batch = workload("critics", 2, NUM_TOKENS, 20).batch
    _, results = run_plan(llm, batch, "baseline")
    rows = compare_results(llm, batch, results, None)
    assert {row["query"] for row in rows} == {0, 1}
    for row in rows:
        assert 0 <= row["alike"] <= row["words"]
        assert row["alike"] == row["words"] or not row["same"]
    shown = [{**row, "workflow": "critics", "queries": 2, "way": "choreographed"} for row in rows]
    table = TABLES["planner_results"].markdown([_as_read(row) for row in shown])
    assert f"{sum(row['same'] for row in rows)} of {len(rows)}" in table


def test_a_plan_may_be_repaired_whole(llm: Any) -> None:
    """Repair of every token of what is read: the text's distributions."""
    batch = workload("critics", 1, NUM_TOKENS, 20).batch
    text, _ = run_plan(llm, batch, "baseline")
    for row in compare_calls(llm, batch, text.answered, "first:1000"):
        assert row["kl"] < KL_TOLERANCE, row


def _as_read(row: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in row.items()}
