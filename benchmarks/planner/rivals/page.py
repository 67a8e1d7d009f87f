# SPDX-License-Identifier: Apache-2.0
"""The section on plans and their rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

NAME, SWEEP = "planner_rivals", "planner_sweep"
Rows = Sequence[Mapping[str, Any]]
# Best ratios that the plans are to reach: (rival, plan, workflow or any) -> bar.
BARS = {
    ("LangGraph", "plan, exact, messages", "trading"): 1.5,
    ("LangGraph", "plan, choreographed", "trading"): 2.0,
    ("operator by operator", "plan, choreographed", None): 1.6,
    ("query by query", "plan, choreographed", None): 4.0,
}


def seconds(rows: Rows, workflow: str, way: str) -> list[float]:
    """Of all turns."""
    return [float(r["seconds"]) for r in rows if (r["workflow"], r["way"]) == (workflow, way)]


def ratio(rows: Rows, workflow: str, rival: str, way: str) -> float | None:
    """How many times as long the rival takes, by medians."""
    theirs, ours = seconds(rows, workflow, rival), seconds(rows, workflow, way)
    return median(theirs) / median(ours) if theirs and ours else None


def reached(rows: Rows) -> dict[tuple[str, str, str | None], float]:
    """The best ratio of each bar, over the workflows that were run."""
    workflows = list(dict.fromkeys(row["workflow"] for row in rows))
    found = {}
    for rival, way, only in BARS:
        ratios = [ratio(rows, w, rival, way) for w in workflows if only in (None, w)]
        if known := [value for value in ratios if value is not None]:
            found[rival, way, only] = max(known)
    return found


def section() -> str:
    """Empty if there are no results."""
    rows, swept = read_csv(NAME), read_csv(SWEEP)
    parts = [*(_rivals(rows) if rows else []), *(_sweep(swept) if swept else [])]
    return "\n\n".join(["## Workflows as query plans", *parts]) if parts else ""


def _rivals(rows: Rows) -> list[str]:
    workflows = list(dict.fromkeys(row["workflow"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for way in ways:
        cells = [_cell(rows, workflow, way) for workflow in workflows]
        lines.append([way, *cells])
    bars = [
        f"{way} against {rival}{f' on {only}' if only else ', best workflow'}: "
        f"**{found:.2f}×** (bar {BARS[rival, way, only]:g})"
        for (rival, way, only), found in reached(rows).items()
    ]
    return [
        "Seconds for a batch of each workflow on one engine, the ways of a command in turn, "
        "an empty cache before each; median and spread of turns, in brackets the share of the"
        " tokens of prompts that was not encoded. Answers have a fixed length; exact ways say"
        " the same, token by token (checked). Rivals send text over vLLM's prefix caching, as"
        " many calls at a time as plans do, on the engine of the plans; *LangGraph* asks `vllm "
        "serve` without the plugin, *in process* that engine. Before trading, the day before "
        "was run, untimed: half of what analysts read is the same.",
        table(["way", *workflows], lines),
        "; ".join(bars) + ".",
        _machines(rows),
    ]


def _sweep(rows: Rows) -> list[str]:
    """How the ways grow with the batch, the branches and the rounds."""
    names = list(dict.fromkeys(row["workflow"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for name in names:
        times = [seconds(rows, name, way) for way in ways]
        ratios = [f"{median(times[0]) / median(one):.2f}×" for one in times[1:]]
        lines.append([name, *(with_spread(one, ".1f") for one in times), *ratios])
    head = ["trading", *ways, *(f"{ways[0]} / {way}" for way in ways[1:])]
    text = "Trading in other sizes: seconds, and how many times as long the rival takes."
    return [text, table(head, lines), _machines(rows)]


def _machines(rows: Rows) -> str:
    """Workflows may have been run one by one."""
    return " ".join(dict.fromkeys(machine_line([row]) for row in rows))


def _cell(rows: Rows, workflow: str, way: str) -> str:
    found = [r for r in rows if (r["workflow"], r["way"]) == (workflow, way)]
    if not found:
        return ""
    saved = median(1 - float(row["encoded"]) / float(row["prompt"]) for row in found)
    return f"{with_spread(seconds(rows, workflow, way), '.1f')} ({saved:.0%})"
