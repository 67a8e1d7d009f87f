# SPDX-License-Identifier: Apache-2.0
"""The tables of memory: calls that read the same messages, and a long session."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Table, text
from benchmarks.memory.bars import BAR, PROCESSES, growth

# CSV files by mode; the baseline, the same calls as text, is the control.
LONG_SESSION = {"choreo": "long_session", "baseline": "long_session_baseline"}
MODES = ("choreo", "baseline")
_FIGURES = {
    "blocks in tables": "table_entries",
    "blocks in use": "used_blocks",
    "s to the last first token": "last_first_token_s",
    "s in all": "seconds",
}


def _megabytes(column: str, at: int) -> Cell:
    return lambda rows: f"{int(rows[at][column]) / 1e6:.1f}"


def _growth(column: str) -> Cell:
    return lambda rows: f"{growth(rows, column):+.1f}"


def _long_session(mode: str) -> Table:
    """One line: all rows are of one session."""
    columns: dict[str, Cell] = {}
    for name, column in PROCESSES.items():
        columns[f"{name}, MB"] = _megabytes(column, 0)
        columns[f"{name}, end"] = _megabytes(column, -1)
        columns[f"{name}, B/call"] = _growth(column)
    columns["bar, B/call"] = lambda rows: f"{BAR:.0f}"
    columns["calls"] = lambda rows: f"{int(rows[-1]['calls']):,}"
    return Table(LONG_SESSION[mode], {"side": lambda row: mode}, columns)


TABLES = {
    "memory": Table(
        "memory",
        {"pass": "pass"},
        {
            f"{title}, {mode}": text(column, mode=mode)
            for title, column in _FIGURES.items()
            for mode in MODES
        },
        rows=lambda rows: sorted(rows, key=lambda row: row["pass"]),
    ),
    **{name: _long_session(mode) for mode, name in LONG_SESSION.items()},
}
