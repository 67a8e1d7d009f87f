# SPDX-License-Identifier: Apache-2.0
"""The tables of training: each task with its own adapters, and what comes through of a secret."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, stored, text
from benchmarks.training.bars import is_won_back
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.trained_adapter import PLACEMENTS

# What the text itself cannot do tells nothing of answers.
_MIN_COVERED = 0.2


def _right(arm: str) -> Cell:
    return stored("accuracy", ".0f", 100, arm=arm)


def _own(rows: Rows, placement: str) -> Row | None:
    """The row of a set's own adapter of one epoch."""
    return next((row for row in rows if row["arm"] == f"{row['set']}-{placement}"), None)


def _own_right(placement: str) -> Cell:
    def cell(rows: Rows) -> str:
        row = _own(rows, placement)
        if row is None:
            return ""
        gone = f", {float(row['kl_gap_closed']):.0%}" if row["kl_gap_closed"] else ""
        return f"{_right(row['arm'])(rows)}{gone}"

    return cell


def _won_back(rows: Rows) -> str:
    """The placements whose adapters win everything back, more epochs included."""
    texts = next(row for row in rows if row["arm"] == TEXT)
    if float(texts["coverage"] or 0) < _MIN_COVERED:
        return ""
    own = {
        placement: [row for row in rows if row["arm"].startswith(f"{row['set']}-{placement}")]
        for placement in PLACEMENTS
    }
    won = [name for name, found in own.items() if any(is_won_back(row, texts) for row in found)]
    return ", ".join(won) or "none"


TABLES = {
    "training": Table(
        "training",
        {"model": "model", "task": "set"},
        {
            "problems": text("problems"),
            "text": _right(TEXT),
            "covered": stored("coverage", ".0f", 100, arm=TEXT),
            "choreographed": _right(CHOREOGRAPHED),
            **{f"{placement}, gone": _own_right(placement) for placement in PLACEMENTS},
            "won back": _won_back,
            "direct": _right("direct"),
        },
    ),
    "training_leakage": Table(
        "training_leakage", {"arm": "arm"}, {"shift, nats per token": stored("shift", ".4f")}
    ),
}
