# SPDX-License-Identifier: Apache-2.0
"""The tables of quality: tasks, what comes through of a note, and the debates."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Rows, Table, mean, of, spread, stored
from benchmarks.quality.tasks import ALONE, BASELINE, CHOREO, EXACT, NO_DOCUMENTS


def _right(way: str) -> Cell:
    return stored("score", ".0f", 100, way=way)


def _same_texts(way: str) -> Cell:
    def cell(rows: Rows) -> str:
        return next((f"{r['same_texts']} of {r['n']}" for r in rows if r["way"] == way), "")

    return cell


def _never_differs(rows: Rows) -> str:
    return f"{sum(row['first'] == row['tokens'] for row in rows)} of {len(rows)}"


TABLES = {
    "quality": Table(
        "quality_tasks",
        {"task, right in %": "task"},
        {
            "baseline": _right(BASELINE),
            "exact": _right(EXACT),
            "same texts": _same_texts(EXACT),
            "choreo": _right(CHOREO),
            "minus baseline": stored("difference", ".0f", 100, way=CHOREO),
            "each alone": _right(ALONE),
            "minus baseline, alone": stored("difference", ".0f", 100, way=ALONE),
            "no documents": _right(NO_DOCUMENTS),
        },
    ),
    "quality_leakage": Table(
        "quality_leakage",
        {"documents that read a note": "way"},
        {
            "right, %": stored("score", ".0f", 100),
            "minus without note": stored("difference", ".0f", 100),
            "note's number, %": stored("note", ".0f", 100),
            "its log-probability, nats": stored("gain", "+.2f"),
        },
    ),
    "quality_agreement": Table(
        "quality_agreement",
        {"debates": "way"},
        {
            "tokens before one differs": spread(of("first"), ".0f"),
            "none differs": _never_differs,
            "KL, nats per token": mean(of("kl"), ".2g"),
            "same likeliest token": mean(of("top1"), ".3f"),
        },
    ),
}
