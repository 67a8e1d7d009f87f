# SPDX-License-Identifier: Apache-2.0
"""The section on training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table
from vllm_choreo.judge.scores import CHOREOGRAPHED, TEXT

NAME = "training"
Row = Mapping[str, str]


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    parts = [
        "## What training wins back",
        "Adapters of rank 16, each trained on one task's recorded runs alone, judged on problems "
        "that no training has seen, of its own task (**bold**) and of others; greedy. *Writer*: "
        "messages are encoded with it, and the plain model answers; *reader*: the other way round; "
        "*both*. *p*: McNemar's exact test against the text's answers. *KL*: to what the text "
        "says, over the whole vocabulary, nats per token. No token is encoded anew.",
    ]
    for name in sets:
        parts.append(f"### {name}, {rows_of(rows, name)[0]['problems']} problems")
        parts.append(_table(rows_of(rows, name), name))
    return "\n\n".join([*parts, _verdict(rows, sets), machine_line(rows)])


def rows_of(rows: list[dict[str, str]], name: str) -> list[Row]:
    """Those of a set."""
    return [row for row in rows if row["set"] == name]


def is_won_back(row: Row) -> bool:
    """Whether an arm's answers are not significantly fewer than the text's, and three quarters of
    the distance to it are gone.
    """
    fewer = float(row["difference"]) < 0 and float(row["p_value"]) < 0.05
    return not fewer and float(row["kl_gap_closed"] or 0) >= 0.75


def _table(rows: list[Row], name: str) -> str:
    lines: list[list[Any]] = []
    for row in rows:
        own = row["arm"].startswith(f"{name}-")
        arm = f"**{row['arm']}**" if own else row["arm"]
        ends = (row[f"accuracy{end}"] for end in ("", "_low", "_high"))
        right, low, high = (f"{100 * float(end):.0f}" for end in ends)
        is_text = row["arm"] == TEXT
        lines.append(
            [
                arm,
                f"{right} [{low}, {high}]",
                "" if is_text else f"{100 * float(row['difference']):+.1f}",
                "" if is_text else f"{float(row['p_value']):.3f}",
                f"{float(row['kl']):.4f}" if row["kl"] else "",
                "" if row["arm"] in (TEXT, CHOREOGRAPHED) else _percent(row["kl_gap_closed"]),
                row["minutes"],
            ]
        )
    head = ["arm", "right, %", "minus text, points", "p", "KL", "of it gone", "trained, min"]
    return table(head, lines)


def _percent(share: str) -> str:
    return f"{float(share):.0%}" if share else ""


def _verdict(rows: list[dict[str, str]], sets: list[str]) -> str:
    """On which tasks their own adapters win everything back."""
    said = []
    for placement in ("writer", "reader", "both"):
        own = [row for row in rows if row["arm"].startswith(f"{row['set']}-{placement}")]
        tried = dict.fromkeys(row["set"] for row in own)
        won = dict.fromkeys(row["set"] for row in own if is_won_back(row))
        if own:
            said.append(f"{placement}: {len(won)} of {len(tried)} ({', '.join(won) or 'none'})")
    return (
        "Tasks on which an adapter of their own answers no worse than the text (p ≥ 0.05, or not "
        "fewer) and leaves a quarter of the distance at most: " + "; ".join(said) + "."
    )
