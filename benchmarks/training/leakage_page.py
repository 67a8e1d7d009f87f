# SPDX-License-Identifier: Apache-2.0
"""The section on what comes through of a secret."""

from __future__ import annotations

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table

NAME = "training_leakage"


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    lines = [
        [row["arm"], *(f"{float(row[f'shift{end}']):.4f}" for end in ("", "_low", "_high"))]
        for row in rows
    ]
    return "\n\n".join(
        [
            "### What comes through of a secret",
            f"Prisoner's dilemma, {rows[0]['games']} games as text, of which all that was said is "
            "forced again: once Bob alone is told to cooperate whatever happens, once to defect. "
            "By how much the log-probability of what Alice says then shifts, who reads nothing but "
            "the same words: nats per token, mean and interval over games.",
            table(["arm", "shift", "from", "to"], lines),
            machine_line(rows),
        ]
    )
