# SPDX-License-Identifier: Apache-2.0
"""The tables of scaling: to the first token, and decoding."""

from __future__ import annotations

from benchmarks.harness.stats import median
from benchmarks.harness.tables import Cell, Rows, Table, of, ratio, spread, text
from benchmarks.scaling.rows import passes_of, rivals
from benchmarks.scaling.rows import ratio as throughput_ratio

_POINTS = {(500, 1), (2000, 1), (8000, 1), (500, 4), (500, 16)}  # the picture has them all


def _times(side: str) -> Cell:
    return spread(of("median_s", 1e3, side=side), ".0f")


def _some_points(rows: Rows) -> Rows:
    """Rows of the points in RESULTS.md; all rows, if a run had others."""
    found = [row for row in rows if (int(row["tokens"]), int(row["readers"])) in _POINTS]
    return found or rows


def _throughput(side: str) -> Cell:
    """Tokens per second of all readers together."""

    def values(rows: Rows) -> list[float]:
        return [int(r["readers"]) / float(r["step_s"]) for r in rows if r["side"] == side]

    return spread(values, ".0f")


def _together_against(side: str) -> Cell:
    """Ratios of throughput, pass by pass."""

    def cell(rows: Rows) -> str:
        if side not in rivals(rows):
            return ""
        readers = int(rows[0]["readers"])
        found = (throughput_ratio(rows, number, side, readers) for number in passes_of(rows))
        return ", ".join(f"{value:.2f}" for value in found)

    return cell


def _at_most(side: str) -> Cell:
    """The ratio that would remain if the messages cost nothing."""

    def cell(rows: Rows) -> str:
        theirs, floor = (of("step_s", side=one)(rows) for one in (side, "no context"))
        return f"{median(theirs) / median(floor):.2f}" if theirs and floor else ""

    return cell


TABLES = {
    "scaling_first_token": Table(
        "scaling_first_token",
        {"tokens": "tokens", "readers": "readers"},
        {
            "choreographed, ms": _times("choreo"),
            "cached prefix, ms": _times("prefix"),
            "text, ms": _times("text"),
            "text / choreographed": ratio(
                of("median_s", side="text"), of("median_s", side="choreo"), ".1f"
            ),
            "prefix / choreographed": ratio(
                of("median_s", side="prefix"), of("median_s", side="choreo"), ".2f"
            ),
            "KV blocks": text("blocks", side="choreo"),
            "KV blocks, prefix": text("blocks", side="prefix"),
            "KV blocks, text": text("blocks", side="text"),
        },
        rows=_some_points,
    ),
    "scaling_decode": Table(
        "scaling_decode",
        {"readers": "readers"},
        {
            "together, tokens/s": _throughput("grouped"),
            "each by itself": _throughput("ungrouped"),
            "cached prefix": _throughput("prefix"),
            "nothing to read": _throughput("no context"),
            "together / by itself": _together_against("ungrouped"),
            "at most": _at_most("ungrouped"),
            "together / prefix": _together_against("prefix"),
            "at most, prefix": _at_most("prefix"),
        },
    ),
}
