# SPDX-License-Identifier: Apache-2.0
"""The section on training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table
from benchmarks.training.picture import draw
from vllm_choreo.judge.scores import CHOREOGRAPHED, TEXT

NAME = "training"
Row = Mapping[str, str]
# What the text itself cannot do tells nothing of answers.
_MIN_COVERED = 0.2


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv(NAME)
    if not rows:
        return ""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    parts = [
        "## What training wins back",
        "Adapters of rank 16, each trained on one task's recorded runs alone, judged on problems "
        "that no training has seen, of its own task (**bold**) and of others; greedy, but for "
        "votes (temperature 0.7). *Writer*: "
        "messages are encoded with it, and the plain model answers; *reader*: the other way round; "
        "*both*. *p*: McNemar's exact test against the text's answers. *KL*: to what the text "
        "says, over the whole vocabulary, nats per token. *Same calls*: where both say "
        "what the text has said, the same tokens are the likeliest. No token is encoded anew.",
    ]
    answered = [name for name in sets if all(row["accuracy"] for row in rows_of(rows, name))]
    if answered:
        draw([row for row in rows if row["set"] in answered], answered, NAME)
        parts.append(f"![Answers, and the distance that is gone](results/{NAME}.png)")
    for name in sets:
        parts.append(f"### {name}, {rows_of(rows, name)[0]['problems']} problems")
        parts.append(_table(rows_of(rows, name), name))
    return "\n\n".join([*parts, _verdict(rows), machine_line(rows)])


def rows_of(rows: list[dict[str, str]], name: str) -> list[Row]:
    """Those of a set."""
    return [row for row in rows if row["set"] == name]


def is_won_back(row: Row, text: Row) -> bool:
    """Whether an arm's answers are not significantly fewer than the text's, or cover as much as its
    interval has, and three quarters of the distance to it are gone where it was measured.
    """
    if row["difference"]:
        fewer = float(row["difference"]) < 0 and float(row["p_value"]) < 0.05
    else:
        fewer = bool(row["coverage"]) and float(row["coverage"]) < float(text["coverage_low"])
    is_near = not row["kl_gap_closed"] or float(row["kl_gap_closed"]) >= 0.75
    return is_near and not fewer


# What a table has of an arm where any has it: heading, cell.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("right, %", lambda row: _with_interval(row, "accuracy")),
    ("minus text, points", lambda row: _unless_text(row, _points(row["difference"]))),
    ("p", lambda row: _unless_text(row, _number(row["p_value"], ".3f"))),
    ("covered, %", lambda row: _with_interval(row, "coverage")),
    ("same calls", lambda row: _unless_text(row, _same_calls(row))),
    ("KL", lambda row: _number(row["kl"], ".4f")),
    ("of it gone", lambda row: "" if row["arm"] == CHOREOGRAPHED else _gone(row)),
    ("trained, min", lambda row: row["minutes"]),
)


def _table(rows: list[Row], name: str) -> str:
    arms = [f"**{r['arm']}**" if r["arm"].startswith(f"{name}-") else r["arm"] for r in rows]
    head, columns = ["arm"], [arms]
    is_single = all(row["coverage"] == row["accuracy"] for row in rows)  # all or nothing
    for title, cell in _COLUMNS:
        cells = [cell(row) for row in rows]
        if any(cells) and not (title == "covered, %" and is_single):
            head.append(title)
            columns.append(cells)
    return table(head, [list(line) for line in zip(*columns, strict=True)])


def _with_interval(row: Row, name: str) -> str:
    if not row[name]:
        return ""
    right, low, high = (f"{100 * float(row[name + end]):.0f}" for end in ("", "_low", "_high"))
    return f"{right} [{low}, {high}]"


def _unless_text(row: Row, cell: str) -> str:
    return "" if row["arm"] == TEXT else cell


def _number(value: str, form: str) -> str:
    return format(float(value), form) if value else ""


def _points(share: str) -> str:
    return f"{100 * float(share):+.1f}" if share else ""


def _gone(row: Row) -> str:
    return _unless_text(row, f"{float(row['kl_gap_closed']):.0%}" if row["kl_gap_closed"] else "")


def _same_calls(row: Row) -> str:
    """By role, of calls that the text makes of what it has said; one role alone is the answer."""
    same, compared = (json.loads(row[name] or "{}") for name in ("same_calls", "compared_calls"))
    if len(compared) < 2:
        return ""
    return ", ".join(f"{role} {same[role] / count:.0%}" for role, count in compared.items())


def _verdict(rows: list[dict[str, str]]) -> str:
    """On which tasks their own adapters win everything back, of those that the text can do."""
    texts = {row["set"]: row for row in rows if row["arm"] == TEXT}
    rows = [row for row in rows if float(texts[row["set"]]["coverage"] or 0) >= _MIN_COVERED]
    said = []
    for placement in ("writer", "reader", "both"):
        own = [row for row in rows if row["arm"].startswith(f"{row['set']}-{placement}")]
        tried = dict.fromkeys(row["set"] for row in own)
        won = dict.fromkeys(row["set"] for row in own if is_won_back(row, texts[row["set"]]))
        if own:
            said.append(f"{placement}: {len(won)} of {len(tried)} ({', '.join(won) or 'none'})")
    return (
        "Tasks on which an adapter of their own answers no worse than the text (p ≥ 0.05, or not "
        "fewer; or covers what the text's interval has) and leaves a quarter of the distance at "
        "most, of those that the text answers in one case of five or more: " + "; ".join(said) + "."
    )
