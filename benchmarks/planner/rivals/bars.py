# SPDX-License-Identifier: Apache-2.0
"""The bars of plans against their rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.stats import median

Rows = Sequence[Mapping[str, Any]]
# Best ratios that the plans are to reach: (rival, plan, workflow or any) -> bar.
BARS = {
    ("LangGraph", "plan, exact, messages", "trading"): 1.5,
    ("LangGraph", "plan, choreographed", "trading"): 2.0,
    ("operator by operator", "plan, choreographed", None): 1.6,
    ("query by query", "plan, choreographed", None): 4.0,
}


class Batch(NamedTuple):
    """A workflow, its queries, and whether engines ran the model themselves."""

    workflow: str
    queries: int
    is_one_process: bool

    def __str__(self) -> str:
        process = ", one process" if self.is_one_process else ""
        return f"{self.workflow}, {self.queries}{process}"


def batches(rows: Rows) -> dict[Batch, list[Mapping[str, Any]]]:
    """The rows of each batch that was run."""
    found: dict[Batch, list[Mapping[str, Any]]] = {}
    for row in rows:
        batch = Batch(row["workflow"], int(row["queries"]), row["one_process"] == "True")
        found.setdefault(batch, []).append(row)
    return found


def seconds(rows: Rows, way: str) -> list[float]:
    """Seconds of a way in all turns of a batch."""
    return [float(row["seconds"]) for row in rows if row["way"] == way]


def ratio(rows: Rows, rival: str, way: str) -> float | None:
    """Ratio of what the rival and a way take for a batch, by medians."""
    theirs, ours = seconds(rows, rival), seconds(rows, way)
    return median(theirs) / median(ours) if theirs and ours else None


def reached(rows: Rows) -> dict[tuple[str, str, str | None], tuple[float, Batch]]:
    """The best ratio of each bar, and the batch of which it is."""
    found = {}
    for rival, way, only in BARS:
        of_batches = {
            batch: ratio(of_batch, rival, way)
            for batch, of_batch in batches(rows).items()
            if only in (None, batch.workflow)
        }
        if known := [(value, batch) for batch, value in of_batches.items() if value is not None]:
            found[rival, way, only] = max(known)
    return found
