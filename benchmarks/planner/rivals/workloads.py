# SPDX-License-Identifier: Apache-2.0
"""The six workflows of the paper, over made-up inputs, as batches of queries.

In trading, as in the paper, the day before has been traded, and half of what is read is the same.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.planner.data import role, text
from vllm_choreo.planner import CompiledGraph, build
from vllm_choreo.planner.patterns import (
    ANALYSTS,
    debate,
    iterative_refinement,
    map_reduce,
    parallel_chains,
    reflection,
    trading,
)

_ROLES = [
    role(name, 60)
    for name in (
        *("an economist", "a lawyer", "an engineer", "a historian", "a banker", "a chemist"),
        *("a farmer", "an insurer"),
    )
]
NAMES = ("map_reduce", "debate", "reflection", "iterative", "parallel", "trading")
# What these analysts of a stock read; the other two read the same on both days.
_NEW_EVERY_DAY = ("market", "news")


@dataclass(frozen=True)
class Workload:
    """A batch of queries.

    Attributes:
        batch: what is timed.
        before: what was run on the same engine the day before; None: nothing.
    """

    batch: CompiledGraph
    before: CompiledGraph | None = None


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Which workflows are run, how large, and how often."""
    parser.add_argument("--workflow", choices=NAMES, action="append")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=150, help="of a context or document")


def workload(name: str, num_queries: int, num_out: int, words: int) -> Workload:
    """One of `NAMES`; `words` are those of a context or a document."""
    if name == "trading":
        return trading_days(num_queries, num_out, words)
    sampling = _sampling(num_out)
    each = range(num_queries)
    task = {
        "context": [text(f"context {i}", words) for i in each],
        "question": [text(f"question {i}", 12) for i in each],
    }
    chunks = {f"chunk_{c}": [text(f"{i} {c}", words) for i in each] for c in (1, 2, 3)}
    graphs = {
        "map_reduce": lambda: build([map_reduce(_ROLES[:4], sampling=sampling)]).compile(**task),
        "debate": lambda: build(debate(_ROLES[:3], sampling=sampling)).compile(**task),
        "reflection": lambda: build([reflection(_ROLES[:2], sampling=sampling)]).compile(**task),
        "iterative": lambda: build([iterative_refinement(3, sampling=sampling)]).compile(**chunks),
        "parallel": lambda: build([parallel_chains(_ROLES[:4], 3, sampling=sampling)]).compile(
            **chunks
        ),
    }
    return Workload(graphs[name]())


def trading_days(
    num_queries: int, num_out: int, words: int, *, traders: int = 8, rounds: int = 1
) -> Workload:
    """A stock a query, on the second of two days.

    Args:
        traders: chains of a trader and three risk managers; up to 8.
        rounds: of the debates.
    """
    graph = build([trading(_ROLES[:traders], rounds=rounds, sampling=_sampling(num_out))])
    first, second = (_desk(day, num_queries, words) for day in (1, 2))
    return Workload(graph.compile(**second), graph.compile(**first))


def _desk(day: int, num_queries: int, words: int) -> dict[str, list[str]]:
    """What the analysts read."""
    each = range(num_queries)
    desk = {"ticker": [f"T{i}" for i in each]}
    for kind in ANALYSTS:
        edition = day if kind in _NEW_EVERY_DAY else 1
        desk[kind] = [text(f"{kind} {i} of day {edition}", words) for i in each]
    return desk


def _sampling(num_out: int) -> dict[str, object]:
    return {"temperature": 0.0, "max_tokens": num_out, "ignore_eos": True}
