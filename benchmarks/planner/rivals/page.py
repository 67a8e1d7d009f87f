# SPDX-License-Identifier: Apache-2.0
"""The section on plans and their rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Batch(NamedTuple):
    """What was run, and whether engines ran the model themselves."""

    workflow: str
    queries: int
    is_one_process: bool

    def __str__(self) -> str:
        process = ", one process" if self.is_one_process else ""
        return f"{self.workflow}, {self.queries}{process}"


def batches(rows: Rows) -> dict[Batch, list[Mapping[str, Any]]]:
    """The rows of each batch that was run."""
    found: dict[Batch, list[Mapping[str, Any]]] = {}
    for row in rows:
        batch = Batch(row["workflow"], int(row["queries"]), row["one_process"] == "True")
        found.setdefault(batch, []).append(row)
    return found


def seconds(rows: Rows, way: str) -> list[float]:
    """Of all turns of a batch."""
    return [float(row["seconds"]) for row in rows if row["way"] == way]


def ratio(rows: Rows, rival: str, way: str) -> float | None:
    """How many times as long the rival takes for a batch, by medians."""
    theirs, ours = seconds(rows, rival), seconds(rows, way)
    return median(theirs) / median(ours) if theirs and ours else None


def reached(rows: Rows) -> dict[tuple[str, str, str | None], tuple[float, Batch]]:
    """The best ratio of each bar, and the batch of which it is."""
    found = {}
    for rival, way, only in BARS:
        of_batches = {
            batch: ratio(of_batch, rival, way)
            for batch, of_batch in batches(rows).items()
            if only in (None, batch.workflow)
        }
        if known := [(value, batch) for batch, value in of_batches.items() if value is not None]:
            found[rival, way, only] = max(known)
    return found


def section() -> str:
    """Empty if there are no results."""
    rows, swept = read_csv(NAME), read_csv(SWEEP)
    parts = [*(_rivals(rows) if rows else []), *(_sweep(swept) if swept else [])]
    return "\n\n".join(["## Workflows as query plans", *parts]) if parts else ""


def _rivals(rows: Rows) -> list[str]:
    by_batch, ways = batches(rows), dict.fromkeys(row["way"] for row in rows)
    lines = [[way, *(_cell(of_batch, way) for of_batch in by_batch.values())] for way in ways]
    bars = [
        f"{way} against {rival}{f' on {only}' if only else ', best workflow'}: "
        f"**{found:.2f}×** (bar {BARS[rival, way, only]:g}; {batch})"
        for (rival, way, only), (found, batch) in reached(rows).items()
    ]
    return [
        "Seconds for a batch of so many queries of each workflow on one engine, the ways of a "
        "command in turn, an empty cache before each; median and spread of turns, in brackets "
        "the share of the tokens of prompts that was not encoded. Answers have a fixed length; "
        "exact ways say the same, token by token (checked). Rivals send text over vLLM's prefix "
        "caching, as many calls at a time as plans do, on the engine of the plans; *LangGraph* "
        "asks `vllm serve` without the plugin, *in process* that engine. Before trading, the "
        "day before was run, untimed: half of what analysts read is the same. *One process*: "
        "engines, the server's too, run the model themselves; elsewhere a process of its own "
        "does, for which they wait by looking, which takes much of one of two cores.",
        table(["way", *map(str, by_batch)], lines),
        "; ".join(bars) + ".",
        _machines(rows),
    ]


def _sweep(rows: Rows) -> list[str]:
    """How the ways grow with the batch, the branches and the rounds."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for batch, of_batch in batches(rows).items():
        times = [seconds(of_batch, way) for way in ways]
        ratios = [f"{median(times[0]) / median(one):.2f}×" for one in times[1:]]
        lines.append([batch.workflow, *(with_spread(one, ".1f") for one in times), *ratios])
    head = ["trading", *ways, *(f"{ways[0]} / {way}" for way in ways[1:])]
    text = "Trading in other sizes: seconds, and how many times as long the rival takes."
    return [text, table(head, lines), _machines(rows)]


def _machines(rows: Rows) -> str:
    """Workflows may have been run one by one."""
    return " ".join(dict.fromkeys(machine_line([row]) for row in rows))


def _cell(rows: Rows, way: str) -> str:
    found = [row for row in rows if row["way"] == way]
    if not found:
        return ""
    saved = median(1 - float(row["encoded"]) / float(row["prompt"]) for row in found)
    return f"{with_spread(seconds(rows, way), '.1f')} ({saved:.0%})"
