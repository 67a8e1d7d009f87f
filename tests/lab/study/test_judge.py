# SPDX-License-Identifier: Apache-2.0
"""Judging arms: McNemar's test and the scores, against their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from vllm_choreo.lab.study.divergence import divergence, kl_per_token, same_calls
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT, Judged, rows_of
from vllm_choreo.lab.study.stats import mcnemar, wilson_interval


@pytest.mark.parametrize("n", range(11))
def test_mcnemar_counts_the_splits_that_are_as_uneven(n: int) -> None:
    """Each of the 2^n ways in which fair coins fall is as likely as any other."""
    splits = [sum(coins) for coins in itertools.product((0, 1), repeat=n)]
    for worse in range(n + 1):
        uneven = [s for s in splits if abs(2 * s - n) >= abs(2 * worse - n)]
        assert mcnemar(worse, n - worse) == pytest.approx(len(uneven) / 2**n, rel=1e-12)
        assert mcnemar(worse, n - worse) == mcnemar(n - worse, worse)


def test_mcnemar_of_large_numbers_and_of_none() -> None:
    assert mcnemar(0, 0) == 1.0
    # Where the normal approximation has z = 1.96: (5,098 - 4,902) / sqrt(10,000).
    assert mcnemar(4_902, 5_098) == pytest.approx(0.05, abs=2e-3)
    with pytest.raises(ValueError, match="-1 worse"):
        mcnemar(-1, 2)


def _judged(right: str, kl: Sequence[float] = (), answers: str = "") -> list[Judged]:
    """`right` has 1, 0 or ? for each problem."""
    return [
        Judged(
            (answers[i : i + 1] or "x",),
            {"1": True, "0": False, "?": None}[mark],
            kl[i] if kl else None,
            10 * (i + 1),
        )
        for i, mark in enumerate(right)
    ]


def test_the_row_of_an_arm() -> None:
    arms = {
        TEXT: _judged("11110?", answers="abcdef"),
        CHOREOGRAPHED: _judged("10001?", [1.0, 2.0, 3.0, 0.0, 4.0, 2.0], answers="abxxxx"),
        "+ a": _judged("11001?", [0.5, 1.0, 0.5, 0.0, 2.0, 2.0], answers="abcxxx"),
    }
    text, choreo, adapted = rows_of(arms)
    assert (text["right"], text["judged"], text["problems"]) == (4, 5, 6)
    assert text["difference"] == 0 and text["p_value"] == 1 and text["same"] == 1
    assert text["gap_closed"] is text["kl_gap_closed"] is choreo["gap_closed"] is None
    assert (choreo["right"], choreo["worse"], choreo["better"]) == (2, 3, 1)
    assert choreo["accuracy"] == 2 / 5
    assert (choreo["accuracy_low"], choreo["accuracy_high"]) == wilson_interval(2, 5)
    assert choreo["difference"] == pytest.approx(-2 / 5)
    assert choreo["p_value"] == mcnemar(3, 1) and choreo["same"] == 2 / 6
    assert choreo["kl"] == pytest.approx(12 / 210)  # nats of all problems by tokens of all
    assert adapted["gap_closed"] == pytest.approx((3 - 2) / (4 - 2))
    assert adapted["kl_gap_closed"] == pytest.approx(1 - 6 / 12)
    for row, name in itertools.product((choreo, adapted), ("difference", "kl")):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert adapted["kl_gap_closed_low"] < 0.5 < adapted["kl_gap_closed_high"]


def test_the_cost_of_an_arm() -> None:
    """Means of problems; a problem without a call that generates has no time."""
    one, two, three = (
        Judged(("x",), True, num_encoded=encoded, ttft=ttft)
        for encoded, ttft in ((10, 0.5), (20, None), (60, 1.5))
    )
    (row,) = rows_of({TEXT: [one, two, three]})
    assert (row["encoded"], row["ttft"]) == (30, 1.0)
    assert rows_of({TEXT: [two]})[0]["ttft"] is None


def test_what_answers_hold_and_which_calls_are_the_same() -> None:
    """Coverage in the mean of the problems that are judged; calls summed by role."""
    text = [
        Judged(("x",), True, coverage=cover, same_calls={"vote": (2, 2), "answer": (1, 1)})
        for cover in (1.0, 0.5, None)
    ]
    arm = [
        Judged(("x",), True, coverage=cover, same_calls={"vote": (same, 2)})
        for cover, same in ((0.5, 0), (0.25, 1), (None, 2))
    ]
    text_row, row = rows_of({TEXT: text, CHOREOGRAPHED: arm})
    assert (text_row["coverage"], text_row["uncovered"]) == (0.75, 0)
    assert row["coverage"] == 0.375 and row["uncovered"] == pytest.approx(0.375)
    assert row["uncovered_low"] <= row["uncovered"] <= row["uncovered_high"]
    assert text_row["same_calls"] == text_row["compared_calls"] == {"vote": 6, "answer": 3}
    assert row["same_calls"] == {"vote": 3} and row["compared_calls"] == {"vote": 6}


def test_calls_are_the_same_if_every_token_is() -> None:
    base = np.log([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    nearly = np.log([[0.4, 0.35, 0.25], [0.3, 0.3, 0.4]])
    other = np.log([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]])
    found = same_calls(["vote", "vote", None], [base, base, base], [nearly, other, base])
    assert found == {"vote": (1, 2), "": (1, 1)}


def test_what_is_not_known_is_not_made_up() -> None:
    arms = {TEXT: _judged("???"), CHOREOGRAPHED: _judged("???"), "+ a": _judged("???")}
    for row in rows_of(arms):
        assert row["judged"] == 0
        for name in ("right", "accuracy", "difference", "p_value", "kl", "gap_closed"):
            assert row[name] is None
    # Nothing was lost, so nothing can be regained.
    arms = {TEXT: _judged("10"), CHOREOGRAPHED: _judged("11"), "+ a": _judged("11")}
    assert rows_of(arms)[2]["gap_closed"] is None


def test_the_divergence_is_the_sum_over_tokens() -> None:
    base = np.log([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], where=[[True] * 3, [True, False, False]],
                  out=np.full((2, 3), -np.inf))  # fmt: skip
    other = np.log([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    expected = [0.5 * math.log(2) - 0.25 * math.log(2), math.log(2)]
    assert kl_per_token(base, other) == pytest.approx(expected)
    assert divergence([base, base[:1]], [other, base[:1]]) == (pytest.approx(sum(expected)), 3)
    with pytest.raises(ValueError, match="zip"):
        divergence([base], [])
