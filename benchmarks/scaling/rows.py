# SPDX-License-Identifier: Apache-2.0
"""The rows of the CSV files of scaling: which sides there are, and their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median

DECODE_CONTEXT = 4000  # tokens that are read while decoding
UNGROUPED_BAR, PREFIX_BAR = 2.5, 2.0  # tokens/s of 16 readers, grouped / the other
BAR_READERS = 16
NAMES = {
    "choreo": "choreographed",
    "prefix": "cached prefix",
    "stock": "cached prefix, stock vLLM",
    "text": "text after a role",
    "grouped": "choreographed, read together",
    "own orders": "the same, each in its own order",
    "ungrouped": "choreographed, each by itself",
    "no context": "nothing to read",
}
Rows = Sequence[Mapping[str, Any]]


def bars_reached(decode: Rows) -> bool:
    """Whether reading together is as much faster as it should be, in every pass."""
    return all(
        ratio(decode, number, side) >= (UNGROUPED_BAR if side == "ungrouped" else PREFIX_BAR)
        for number in passes_of(decode)
        for side in rivals(decode)
    )


def passes_of(rows: Rows) -> list[Any]:
    return list(dict.fromkeys(row["pass"] for row in rows))


def sides_of(rows: Rows) -> list[str]:
    """In the order of `NAMES`, whichever ran first."""
    found = {row["side"] for row in rows}
    return [side for side in NAMES if side in found]


def ttfts(rows: Rows, side: str, tokens: int, readers: int) -> list[float]:
    """Milliseconds to first token, of all passes."""
    return [
        1e3 * float(row["median_s"])
        for row in rows
        if (row["side"], int(row["tokens"]), int(row["readers"])) == (side, tokens, readers)
    ]


def points_of(rows: Rows) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(tokens, readers) by tokens with one reader, and by readers with the same tokens."""
    points = dict.fromkeys((int(row["tokens"]), int(row["readers"])) for row in rows)
    several = next(tokens for tokens, readers in points if readers > 1)
    by_tokens = sorted(point for point in points if point[1] == 1)
    return by_tokens, sorted(point for point in points if point[0] == several)


def reader_counts(rows: Rows) -> list[int]:
    return sorted({int(row["readers"]) for row in rows})


def step_seconds(rows: Rows, side: str, readers: int, number: Any = None) -> list[float]:
    """Seconds per step."""
    return [
        float(row["step_s"])
        for row in rows
        if row["side"] == side and int(row["readers"]) == readers and number in (None, row["pass"])
    ]


def ratio(rows: Rows, number: Any, side: str, readers: int = BAR_READERS) -> float:
    """Throughput read together / that of another side."""
    theirs = median(step_seconds(rows, side, readers, number))
    return theirs / median(step_seconds(rows, "grouped", readers, number))


def rivals(rows: Rows) -> list[str]:
    """The sides that reading together is compared with."""
    return [side for side in ("ungrouped", "prefix", "stock") if side in sides_of(rows)]


def blocks_of(rows: Rows, side: str, point: tuple[int, int]) -> int:
    return max(
        int(row["blocks"])
        for row in rows
        if (row["side"], int(row["tokens"]), int(row["readers"])) == (side, *point)
    )
