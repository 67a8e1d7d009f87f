# SPDX-License-Identifier: Apache-2.0
"""The page of memory, from its CSV files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE
from benchmarks.harness.pictures import BLUE, panels, save_picture
from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table

NUM_CALLS = 8
NUM_MESSAGES = 8
MODES = ("choreo", "baseline")


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("memory")
    if not rows:
        return ""
    head = ("pass and mode", "calls", "blocks in their tables", "distinct", "blocks in use", "MB",
            "s to the last first token", "s in all")  # fmt: skip
    lines = [
        (
            f"{row['pass']}, {row['mode']}",
            *(row[name] for name in ("running", "table_entries", "distinct_blocks")),
            row["used_blocks"],
            f"{int(row['used_blocks']) * int(row['block_bytes']) / 1e6:.0f}",
            row["last_first_token_s"],
            row["seconds"],
        )
        for row in rows
    ]
    return "\n\n".join(
        [
            "## Memory: eight calls read the same messages",
            f"{NUM_MESSAGES} messages, {rows[0]['message_tokens']} tokens together, read by "
            f"{NUM_CALLS} parallel calls in {NUM_CALLS} orders. What the pool held after the model "
            "step in which most was in use; `s in all` includes encoding the messages.",
            table(head, lines),
            _cost_model(rows),
            machine_line(rows),
        ]
    )


def _cost_model(rows: Sequence[Mapping[str, str]]) -> str:
    by_mode = {row["mode"]: row for row in rows}
    ours, base = (int(by_mode[mode]["used_blocks"]) for mode in MODES)
    copy = int(rows[0]["message_blocks"])
    text = NUM_CALLS * -(-int(rows[0]["message_tokens"]) // BLOCK_SIZE)
    return (
        f"Cost model: one copy of the messages takes {copy} blocks of {BLOCK_SIZE} tokens (each "
        f"message padded to whole blocks), and {NUM_CALLS} calls add 2 of their own at most: "
        f"{copy} to {copy + 2 * NUM_CALLS}; measured {ours}. As text there are {NUM_CALLS} "
        f"copies, not padded: {text} to {text + 2 * NUM_CALLS} blocks; measured {base}, "
        f"{base / ours:.1f} times as much."
    )


# -- a long session ------------------------------------------------------------------------------

WARM_CALLS = 10_000  # after which memory must not grow
# Bytes per call that memory may grow by: less than the smallest object that could be left behind
# (an empty dict takes 64), more than what an allocator adds by chance over as many calls.
BAR = 48.0
# CSV files by mode; the baseline, the same calls as text, is the control.
LONG_SESSION = {"choreo": "long_session", "baseline": "long_session_baseline"}
PROCESSES = {"client": "client_bytes", "engine core": "core_bytes", "worker": "worker_bytes"}


def long_session_section() -> str:
    """The part of RESULTS.md on a long session, from its CSV file; draws the plot."""
    rows = read_csv(LONG_SESSION["choreo"])
    if not rows:
        return ""
    _draw_long_session(rows)
    warm, last = _warm(rows)[0], rows[-1]
    lines = [
        (
            f"{name}, {mode}",
            *(f"{int(row[column]) / 1e6:.1f}" for row in (found[0], _warm(found)[0], found[-1])),
            f"{growth(found, column):+.1f}",
        )
        for mode, csv in LONG_SESSION.items()
        if (found := read_csv(csv))
        for name, column in PROCESSES.items()
    ]
    return "\n\n".join(
        [
            "## Memory: one long session",
            f"{int(last['calls']):,} short calls in one session, in parallel lists, most reading "
            f"some of about {int(last['messages']):,} messages that are there at a time; old ones "
            "are freed. What each process holds of the machine's memory, after garbage was "
            f"collected, in MB, and by how many bytes per call it grows after the first "
            f"{int(warm['calls']):,} calls (least squares). Bar: at most {BAR:.0f}: "
            f"{'reached' if flat(rows) else 'MISSED'}.",
            table(
                ("process", "at first", "warm", "at the end", "bytes per call"),
                lines,
            ),
            "![Memory of a long session](results/long_session.png)",
            machine_line(rows),
        ]
    )


def _warm(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows after the first calls; of a short run, its second half."""
    start = min(WARM_CALLS, int(rows[-1]["calls"]) // 2)
    return [row for row in rows if int(row["calls"]) >= start]


def growth(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """Bytes per call, after the first ones."""
    found = _warm(rows)
    calls = [float(row["calls"]) for row in found]
    return statistics.linear_regression(calls, [float(row[column]) for row in found]).slope


def flat(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether neither process grows."""
    return all(growth(rows, column) <= BAR for column in PROCESSES.values())


def _draw_long_session(rows: Sequence[Mapping[str, Any]]) -> None:
    figure, all_axes = panels([f"Memory of the {name}, MB" for name in PROCESSES])
    for axes, column in zip(all_axes, PROCESSES.values(), strict=True):
        calls = [int(row["calls"]) for row in rows]
        axes.plot(calls, [int(row[column]) / 1e6 for row in rows], color=BLUE, lw=1.4)
        axes.set_xlabel("calls", fontsize=9)
        axes.set_ylim(bottom=0)
    save_picture(figure, "long_session")
