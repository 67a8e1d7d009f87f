# SPDX-License-Identifier: Apache-2.0
"""The tables of the policies: patterns of positions, the share of a step, and drift."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, Values, interval, mean, of, spread
from benchmarks.policies.bars import SHARE_BAR, shares
from benchmarks.policies.patterns import PATTERNS

_TITLES = {pattern.name: pattern.title for pattern in PATTERNS}


def _title(row: Row) -> str:
    return _TITLES[row["pattern"]]


def _later(policy: str) -> Values:
    """Milliseconds to first token of the calls after a pattern's first one."""
    return lambda rows: [
        value
        for value, row in zip(of("ttft_s", 1e3)(rows), rows, strict=True)
        if row["policy"] == policy and int(row["call"])
    ]


def _mean_of(column: str, policy: str, form: str, scale: float = 1.0) -> Cell:
    def cell(rows: Rows) -> str:
        found = of(column, scale, policy=policy)(rows)
        return f"{sum(found) / len(found):{form}}"

    return cell


TABLES = {
    "policies": Table(
        "policies",
        {"pattern": _title},
        {
            "query, ms": spread(_later("query"), ".1f"),
            "in place, ms": spread(_later("in_place"), ".1f"),
            "step, query": spread(of("step_s", 1e3, policy="query"), ".1f"),
            "step, in place": spread(of("step_s", 1e3, policy="in_place"), ".1f"),
            "moving, ms": _mean_of("move_s", "in_place", ".1f", 1e3),
            "blocks, query": _mean_of("blocks", "query", ".0f"),
            "blocks, in place": _mean_of("blocks", "in_place", ".0f"),
        },
    ),
    "policies_repositioned": Table(
        "policies_repositioned",
        {"readers": "readers"},
        {
            "own place, ms": spread(of("step_s", 1e3, side="own"), ".1f"),
            "added": interval(lambda rows: shares(rows, int(rows[0]["readers"])), "+.2%"),
            "bar": lambda rows: f"{SHARE_BAR:.0%}",
        },
    ),
    "policies_drift": Table(
        "policies_drift",
        {"moves": "moves"},
        {
            "keys, in place": mean(of("keys"), ".2%"),
            "attention, in place": mean(of("in_place"), ".2%"),
            "attention, query turned": mean(of("query"), ".2%"),
        },
    ),
}
