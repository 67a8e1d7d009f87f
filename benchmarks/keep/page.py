# SPDX-License-Identifier: Apache-2.0
"""The section on kept messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

BAR = 20.0
_LEAST_TOKENS = 8000  # from which the bar counts


def ratios(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Seconds to encode by seconds to load, of each turn."""
    return [float(row["encode_s"]) / float(row["load_s"]) for row in rows]


def bar_reached(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether loading is as much faster as it should be; with no long runs, yes."""
    long = [row for row in rows if int(row["tokens"]) >= _LEAST_TOKENS]
    return not long or median(ratios(long)) >= BAR


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv("keep")
    if not rows:
        return ""
    lines = []
    for tokens, group in groupby(rows, key=lambda row: int(row["tokens"])):
        found = list(group)
        times = [[float(row[name]) for row in found] for name in ("encode_s", "save_s", "load_s")]
        lines.append(
            [
                f"{tokens:,}",
                found[0]["messages"],
                found[0]["megabytes"],
                *(with_spread(side, ".2f") for side in times),
                with_spread(ratios(found), ".1f"),
            ]
        )
    head = ["tokens", "messages", "MB", "encode, s", "save, s", "load, s", "encode / load"]
    return "\n\n".join(
        [
            "## Kept messages: loading against encoding",
            "Messages are encoded in one list, saved with keys and values into a local folder, "
            "freed, and loaded into another session of the same engine; a reader then says the "
            "same to the bit, and encodes nothing but itself. Median and quartiles over turns. "
            f"Bar: {BAR:g} from {_LEAST_TOKENS:,} tokens on.",
            table(head, lines),
            machine_line(rows),
        ]
    )
