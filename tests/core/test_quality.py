# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark: how distributions are compared, and that its words follow its numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import agreement
from benchmarks.quality import page as quality_page
from benchmarks.quality.tasks import MODES, TASKS, WAYS, score

A, B = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])


def test_equal_distributions_do_not_differ() -> None:
    base = np.stack([A, B, A])
    assert agreement.compare(base, base) == {"tokens": 3, "first": 3, "kl": 0.0, "top1": 1.0}


def test_distributions_are_compared_token_by_token() -> None:
    found = agreement.compare(np.stack([A, A, B, B]), np.stack([A, B, B, A]))
    assert (found["tokens"], found["first"], found["top1"]) == (4, 1, 0.5)
    # KL(A || B) = KL(B || A) = 0.25 ln 2, at two of four tokens.
    assert found["kl"] == pytest.approx(0.25 * math.log(2) / 2)


def test_the_difference_is_the_baselines_to_the_other() -> None:
    base, other = np.log([[0.9, 0.1]]), np.log([[0.5, 0.5]])
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert agreement.compare(base, other)["kl"] == pytest.approx(expected)


def test_every_task_scores_its_own_answer_and_no_empty_one() -> None:
    for task in TASKS:
        for problem in task.make(20, 5):
            assert score(problem, ", ".join(problem.answers)) == 1.0
            assert score(problem, "") == 0.0
    lists = TASKS[3].make(1, 5)[0]
    assert score(lists, lists.documents[0]) == 0.5


def task_rows(low: float, high: float, same: int) -> list[dict[str, str]]:
    """Rows as a CSV file has them: one task, all ways."""
    row = {"task": "look-up", "guess": "0.25", "n": "10", "score_low": "0", "score_high": "1"}
    scores = {quality_page.BASELINE: "0.7", quality_page.EXACT: "0.7", quality_page.CHOREO: "0.5"}
    return [
        {
            **row,
            "way": way.name,
            "score": scores.get(way.name, "0.1"),
            "difference": "-0.2",
            "difference_low": str(low),
            "difference_high": str(high),
            "same_texts": str(same),
        }
        for way in WAYS
    ]


def leak_rows(low: float, high: float) -> list[dict[str, str]]:
    row: dict[str, Any] = {"n": "10", "score": "0.5", "score_low": "0.2", "score_high": "0.8"}
    row |= {"note": "0", "note_low": "0", "note_high": "0.3", "notes": "0"}
    row |= {"difference": "-0.1", "difference_low": "-0.3", "difference_high": "0.1"}
    row |= {"gain": str((low + high) / 2), "gain_low": str(low), "gain_high": str(high)}
    return [{**row, "way": way} for way in (quality_page.WITHOUT_NOTE, *MODES)]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.3, -0.1, "worse"), (0.1, 0.3, "better"), (-0.3, 0.1, "no difference that this sample")],
)
def test_a_verdict_follows_from_the_interval(low: float, high: float, verdict: str) -> None:
    blockage, _, _ = quality_page.findings(task_rows(low, high, 10), leak_rows(-1, 1), [])
    assert f"look-up: 70% to 50%, {verdict}" in blockage
    assert "lower still in 1 of 1 tasks" in blockage


def test_the_loss_is_put_down_to_blockage_only_if_exact_mode_loses_nothing() -> None:
    _, exact, _ = quality_page.findings(task_rows(-0.3, -0.1, 10), leak_rows(-1, 1), [])
    assert "in 10 of 10 answers, so what is lost above is lost by what messages" in exact
    _, exact, _ = quality_page.findings(task_rows(-0.3, -0.1, 5), leak_rows(-1, 1), [])
    assert "in 5 of 10 answers, so not all that differs" in exact


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.5, "more likely"), (-0.5, -0.1, "less likely"), (-0.1, 0.2, "is not seen to come")],
)
def test_leakage_is_claimed_where_it_is_measured(low: float, high: float, verdict: str) -> None:
    _, _, leakage = quality_page.findings(task_rows(-0.3, -0.1, 10), leak_rows(low, high), [])
    assert verdict in leakage and "50% to 50%, no difference that this sample shows" in leakage


def test_the_debates_table_counts_answers_that_never_differ() -> None:
    rows = [
        {"question": str(i), "way": way, "tokens": "8", "first": first, "kl": kl, "top1": "0.9"}
        for way, kl in (("exact", "0"), ("choreo", "0.1"), ("alone", "0.2"))
        for i, first in enumerate(("8", "3", "8", "1"))
    ]
    table = quality_page.agreement_table(rows)
    assert table.count("2 of 4") == 3 and "0.2 [0.2, 0.2]" in table
    *_, drift = quality_page.findings(task_rows(-0.3, -0.1, 10), leak_rows(-1, 1), rows)
    assert "0.1 nats" in drift and "the distance is more: 0.2 nats" in drift
