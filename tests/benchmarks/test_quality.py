# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark: how distributions are compared, and what its tables count."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality import agreement
from benchmarks.quality.tables import TABLES
from benchmarks.quality.tasks import TASKS, score

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


def test_the_debates_table_counts_answers_that_never_differ() -> None:
    rows = [
        {"question": str(i), "way": way, "tokens": "8", "first": first, "kl": kl, "top1": "0.9"}
        for way, kl in (("exact", "0"), ("choreo", "0.1"), ("alone", "0.2"))
        for i, first in enumerate(("8", "3", "8", "1"))
    ]
    table = TABLES["quality_agreement"].markdown(rows)
    assert table.count("2 of 4") == 3 and "0.2 [0.2, 0.2]" in table
