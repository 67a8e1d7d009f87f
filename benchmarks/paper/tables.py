# SPDX-License-Identifier: Apache-2.0
"""The tables: who cooperates, who predicts it, what is answered, and whose story is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.tables import Cell, Row, Rows, Table, Values, mean, of, only
from vllm_choreo.lab.study.judge.command import preferred
from vllm_choreo.lab.workflows.prisoners_dilemma import LEAKS

# The CSV files, and what plays or answers as text.
DILEMMA, QUESTIONS, STORIES = "paper_dilemma", "paper_questions", "paper_stories"
TEXT = "text"

Holds = Callable[[Row], bool]


def share(holds: Holds, **where: str) -> Values:
    """100 for each row for which something holds, and 0 for each other one."""
    return lambda rows: [100.0 * holds(row) for row in only(**where)(rows)]


def minus(above: Values, below: Values) -> Values:
    """Differences, pair by pair."""
    return lambda rows: [a - b for a, b in zip(above(rows), below(rows), strict=True)]


def percent(values: Values) -> Cell:
    """`mean [low, high]`, the 95% bootstrap interval over rows; one row has none."""
    return mean(values, ".1f")


def cooperates(row: Row) -> bool:
    """Whether Bob cooperates; undecided is not."""
    return bool(row["bob"] == "cooperate")


def shift(rows: Rows, leak: str) -> list[float]:
    """Change of Bob's cooperation in points, game by game, against the game as text."""
    return list(minus(share(cooperates, leak=leak), share(cooperates, leak=TEXT))(rows))


def _shifted(leak: str) -> Cell:
    return mean(lambda rows: shift(rows, leak), "+.1f")


def _told(rows: Rows) -> Sequence[float]:
    """Margins of the pairs of which the judge has told log-probabilities."""
    return of("margin")([row for row in rows if row["margin"] != ""])


def _is_right(row: Row) -> bool:
    return bool(row["predicted"] == row["alice"])


def _exploits(row: Row) -> bool:
    return (row["predicted"], row["bob"]) == ("cooperate", "defect")


def _defends(row: Row) -> bool:
    return (row["predicted"], row["bob"]) == ("defect", "defect")


TABLES = {
    "paper_dilemma": Table(
        DILEMMA,
        {"Alice is told to": "strategy"},
        {
            "games": lambda rows: len(only(leak=TEXT)(rows)),
            "Bob cooperates as text, %": percent(share(cooperates, leak=TEXT)),
            **{f"leak {leak}, points": _shifted(leak) for leak in LEAKS},
            "undecided, %": percent(share(lambda row: bool(row["bob"] == "undecided"))),
        },
    ),
    "paper_prediction": Table(
        DILEMMA,
        {"Alice is told to": "strategy", "played": "leak"},
        {
            "Alice cooperates, %": percent(share(lambda row: bool(row["alice"] == "cooperate"))),
            "predicted, %": percent(share(lambda row: bool(row["predicted"] == "cooperate"))),
            "right, %": percent(share(_is_right)),
            "exploits, %": percent(share(_exploits)),
            "defends, %": percent(share(_defends)),
        },
        rows=lambda rows: [row for row in rows if row["predicted"]],
    ),
    "paper_questions": Table(
        QUESTIONS,
        {"questions": "data", "the two": "variant"},
        {
            "pairs": len,
            "first, %": percent(share(lambda row: bool(int(row["first"])))),
            "second, %": percent(share(lambda row: bool(int(row["second"])))),
            "both, %": percent(share(lambda row: bool(int(row["first"]) and int(row["second"])))),
        },
    ),
    STORIES: Table(
        STORIES,
        {
            "judge": lambda row: (
                row["judge"] + ("" if row["may_tie"] == "True" else ", not offered ties")
            )
        },
        {
            "pairs": len,
            "words as text, %": mean(of("coverage_baseline", 100), ".1f"),
            "words choreographed, %": mean(of("coverage_choreo", 100), ".1f"),
            "text wins, %": percent(share(lambda row: row["winner"] == "baseline")),
            "choreographed wins, %": percent(share(lambda row: row["winner"] == "choreo")),
            "tie, %": percent(share(lambda row: row["winner"] == "tie")),
            "same place twice, %": percent(share(lambda row: row["is_torn"] == "1")),
            "choreographed likelier, %": percent(
                lambda rows: [100 * preferred(m) for m in _told(rows)]
            ),
            "by, nats": mean(_told, "+.2f"),
        },
    ),
}
