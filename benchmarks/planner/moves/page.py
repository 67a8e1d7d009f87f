# SPDX-License-Identifier: Apache-2.0
"""The section on moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

NAME = "planner_moves"
MOVED, ENCODED = "moved", "encoded again"
Rows = Sequence[Mapping[str, Any]]


def seconds(rows: Rows, tokens: int, way: str) -> list[float]:
    """Of all turns."""
    return [float(r["seconds"]) for r in rows if (int(r["tokens"]), r["way"]) == (tokens, way)]


def break_even(rows: Rows) -> int | None:
    """The fewest tokens from which on moving is never slower; None: it always is."""
    least = None
    for tokens in sorted({int(row["tokens"]) for row in rows}, reverse=True):
        if median(seconds(rows, tokens, MOVED)) > median(seconds(rows, tokens, ENCODED)):
            break
        least = tokens
    return least


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    lines = []
    for tokens in dict.fromkeys(int(row["tokens"]) for row in rows):
        times = [[1000 * s for s in seconds(rows, tokens, way)] for way in (MOVED, ENCODED)]
        cells = [with_spread(one) for one in times]
        lines.append([tokens, *cells, f"{median(times[1]) / median(times[0]):.2f}×"])
    least = break_even(rows)
    verdict = f"from {least} tokens on" if least is not None else "at no length"
    return "\n\n".join(
        [
            "## Answers that another worker reads",
            "Two engines in processes of their own. Milliseconds until the second has read an "
            "answer of the first and said its next token, for answers of so many tokens: keys and "
            "values moved through memory and read as a message, or the text encoded with the call. "
            "Medians and spreads of turns.",
            table(["tokens", MOVED, ENCODED, "ratio"], lines),
            f"Moving is no slower {verdict}.",
            machine_line(rows),
        ]
    )
