# SPDX-License-Identifier: Apache-2.0
"""The page and the plot of the policies, from their CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, INK, RED, draw_line, name_ticks, panels, save_picture
from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, spread
from benchmarks.harness.tables import table, with_spread
from benchmarks.policies.patterns import PATTERNS, POLICIES
from vllm_choreo.judge.stats import bootstrap_interval

SHARE_BAR = 0.03  # of a decode step, that a repositioned message may add
Rows = Sequence[Mapping[str, Any]]


def section() -> str:
    """This benchmark's part of RESULTS.md; draws the plot."""
    calls, shares = read_csv("policies"), read_csv("policies_repositioned")
    drift = read_csv("policies_drift")
    if not calls or not shares or not drift:
        return ""
    _draw_drift(drift)
    return "\n\n".join(
        [
            "## Repositioning: turn the query, or move the keys",
            "Readers of one message of 4,000 tokens, at distances of 0 (its own place) to 800 "
            "tokens behind it; calls of a pattern follow one another, and the first call finds the "
            "message where it was encoded. Log-probabilities under both policies were compared "
            "before. Medians [quartiles] over calls and passes; milliseconds to the first token "
            "and per decode step; blocks moved and blocks in use per call, those of the message "
            "left out.",
            _pattern_table(calls),
            _move_model(calls),
            _verdict(calls),
            "### What a repositioned message adds to a decode step",
            'Under "query": decode steps of readers that are each at another distance, against '
            "readers at the message's own place, in turn. Interval: bootstrap, 95 %, of the median "
            f"over pairs. Bar: at most {SHARE_BAR:.0%}: "
            f"{'reached' if bar_reached(shares) else 'MISSED'}.",
            _share_table(shares),
            "Cost model: a query of 64 dims is turned with 192 multiply-adds per head and layer "
            "and then meets 4,000 keys with 512,000, so the expected share is below 0.1 %.",
            "### Drift in bfloat16",
            "Random keys of 512 tokens, moved again and again by up to 2,000 positions, against "
            "one rotation in float64: error relative to the root mean square, mean over seeds.",
            _drift_table(drift),
            "Cost model: a move rounds every key once more, to 8 bits; independent roundings add "
            "up to the first one's error times the root of the number of moves. A query that is "
            "turned leaves the keys as they are.",
            "![Drift](results/policies_drift.png)",
            machine_line(calls),
        ]
    )


# -- patterns ------------------------------------------------------------------------------------


def _select(rows: Rows, pattern: str, policy: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["pattern"], row["policy"]) == (pattern, policy)]


def _pattern_table(rows: Rows) -> str:
    lines = []
    for pattern in PATTERNS:
        for policy in POLICIES:
            found = _select(rows, pattern.name, policy)
            again = [row for row in found if int(row["call"])]
            lines.append(
                (
                    f"{pattern.title}, {policy}",
                    *(_milliseconds(part, "ttft_s") for part in (_first(found), again)),
                    _milliseconds(found, "step_s"),
                    _mean(found, "in_place_blocks"),
                    _mean(found, "copied_blocks"),
                    f"{1e3 * sum(float(r['move_s']) for r in found) / len(found):.1f}",
                    _mean(found, "blocks"),
                )
            )
    head = ("pattern, policy", "first call: first token", "later calls", "decode step",
            "moved in place", "copied", "ms for moving", "blocks in use")  # fmt: skip
    return table(head, lines)


def _move_model(rows: Rows) -> str:
    """What moving a block costs, by the bytes that are read and written."""
    block, speed = float(rows[0]["block_bytes"]), float(rows[0]["memory_bytes_per_s"])
    in_place = _per_block([row for row in rows if not int(row["copied_blocks"])])
    mixed = [row for row in rows if int(row["copied_blocks"])]
    return (
        "Cost model: a move in place reads and writes the keys, half of a block of "
        f"{block / 1e6:.2f} MB, which at the {speed / 1e9:.0f} GB/s that a sum over 1 GiB reached "
        f"in the same run takes {1e6 * block / speed:.0f} µs; measured {1e6 * in_place:.0f} µs. A "
        f"copy moves all of it, {2e6 * block / speed:.0f} µs; measured "
        f"{1e6 * _per_block(mixed):.0f} µs, those in place beside it included. Beyond that, "
        "copies take memory, and are read by one call each."
    )


def _per_block(rows: Rows) -> float:
    """Seconds per block moved, over all calls."""
    blocks = sum(int(row["in_place_blocks"]) + int(row["copied_blocks"]) for row in rows)
    return sum(float(row["move_s"]) for row in rows) / blocks


def _first(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if int(row["call"]) == 0]


def _milliseconds(rows: Rows, column: str) -> str:
    return with_spread([1e3 * float(row[column]) for row in rows], ".1f")


def _mean(rows: Rows, column: str) -> str:
    return f"{sum(float(row[column]) for row in rows) / len(rows):.0f}"


def _verdict(rows: Rows) -> str:
    """Which policy should be the default, by these measurements."""
    gains = {p.title: _call_seconds(rows, p.name, "in_place") / _call_seconds(rows, p.name, "query")
             for p in PATTERNS}  # fmt: skip
    best, worst = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    default = "query" if gains[worst] - 1 > 1 - gains[best] else "in_place"
    return (
        f'A call, to its last token, takes under "in_place" {gains[best]:.2f} times as long as '
        f'under "query" at the best ({best}) and {gains[worst]:.2f} times at the worst ({worst}). '
        f'By these numbers "{default}" is the better default.'
    )


def _call_seconds(rows: Rows, pattern: str, policy: str) -> float:
    """Of a call with 8 tokens: to the first, and seven steps."""
    found = _select(rows, pattern, policy)
    return median(float(row["ttft_s"]) + 7 * float(row["step_s"]) for row in found)


# -- the share of a step -------------------------------------------------------------------------


def _shares(rows: Rows, readers: int, number: Any = None) -> list[float]:
    """Per pair: what the repositioned side takes more, as a share of the other."""
    seconds: dict[tuple[Any, Any], dict[str, float]] = {}
    for row in rows:
        if int(row["readers"]) == readers and number in (None, row["pass"]):
            pair = seconds.setdefault((row["pass"], row["pair"]), {})
            pair[row["side"]] = float(row["step_s"])
    return [pair["repositioned"] / pair["own"] - 1 for pair in seconds.values()]


def added_share(rows: Rows, readers: int, number: Any = None) -> float:
    """The median over pairs; of one pass, or of all."""
    return median(_shares(rows, readers, number))


def _readers(rows: Rows) -> list[int]:
    return sorted({int(row["readers"]) for row in rows})


def bar_reached(rows: Rows) -> bool:
    """Whether a repositioned message costs as little as it should, for every number of readers."""
    return all(added_share(rows, readers) <= SHARE_BAR for readers in _readers(rows))


def _share_table(rows: Rows) -> str:
    lines = []
    for readers in _readers(rows):
        shares = _shares(rows, readers)
        own = [
            1e3 * float(row["step_s"])
            for row in rows
            if int(row["readers"]) == readers and row["side"] == "own"
        ]
        low, high = bootstrap_interval(shares)
        quartiles = spread(shares)
        lines.append(
            (
                readers,
                with_spread(own, ".1f"),
                f"{median(shares):+.2%}",
                f"[{low:+.2%}, {high:+.2%}]",
                f"[{quartiles[0]:+.2%}, {quartiles[1]:+.2%}]",
            )
        )
    head = ("readers", "step, ms", "added", "interval", "quartiles of pairs")
    return table(head, lines)


# -- drift ---------------------------------------------------------------------------------------


def _errors(rows: Rows, column: str) -> dict[int, list[float]]:
    """By the number of moves."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(int(row["moves"]), []).append(float(row[column]))
    return found


def _drift_table(rows: Rows) -> str:
    columns = [_errors(rows, column) for column in ("keys", "in_place", "query")]
    first = median(columns[0][1])
    lines = [
        (
            moves,
            *(f"{sum(c[moves]) / len(c[moves]):.2%}" for c in columns),
            f"{first * moves**0.5:.2%}",
        )
        for moves in columns[0]
    ]
    head = ("moves", "keys, in place", "attention, in place", "attention, query turned",
            "keys, cost model")  # fmt: skip
    return table(head, lines)


def _draw_drift(rows: Rows) -> None:
    figure, (axes,) = panels(("Error after many moves, bfloat16",))
    lines = (
        ("in_place", "attention, keys moved in place", RED),
        ("keys", "keys, moved in place", INK),
        ("query", "attention, query turned", BLUE),
    )
    for column, label, colour in lines:
        errors = _errors(rows, column)
        values = [[100 * error for error in errors[moves]] for moves in errors]
        draw_line(axes, list(errors), values, label, colour)
    name_ticks(axes, list(_errors(rows, "keys")))
    axes.set_xlabel("moves", fontsize=9)
    axes.set_ylabel("relative error, %", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5)
    save_picture(figure, "policies_drift")
