# SPDX-License-Identifier: Apache-2.0
"""The workflows of the paper, over made-up inputs or named files, as batches of queries.

In trading, as in the paper, the day before has been traded, and half of what is read is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.planner.data import role, text
from benchmarks.planner.files import Inputs, add_files, reviews, tasks_of
from vllm_choreo.planner import CompiledGraph, build
from vllm_choreo.planner.patterns import (
    ANALYSTS,
    PAPER_DOCUMENTS,
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
# As the paper has them: critics in turn, several documents of each analyst and two rounds.
PAPER = ("critics", "trading_documents")
_CHUNKS = 3
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
    """Which workflows are run, how large, and on what."""
    parser.add_argument("--workflow", choices=(*NAMES, *PAPER), action="append")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=150, help="of a context or document")
    add_files(parser)


def asked_workload(name: str, args: argparse.Namespace) -> tuple[str, Workload]:
    """A workflow over the files that are named, if it reads such data, with the name of both."""
    given, label = None, name
    if name in ("iterative", "parallel") and args.reviews is not None:
        given, label = reviews(args.reviews, args.queries, _CHUNKS), f"{name}, reviews"
    elif name not in ("iterative", "parallel", "trading", "trading_documents"):
        tasks = tasks_of(args, args.queries)
        if tasks is not None:
            given, label = tasks[1], f"{name}, {tasks[0]}"
    return label, workload(name, args.queries, args.answer_tokens, args.words, given)


def workload(
    name: str, num_queries: int, num_out: int, words: int, given: Inputs | None = None
) -> Workload:
    """One of `NAMES` or `PAPER`.

    Args:
        name: the workflow.
        num_queries: number of queries.
        num_out: tokens of an answer.
        words: words of a context or a document that is made up.
        given: inputs in place of made-up ones.
    """
    if name in ("trading", "trading_documents"):
        documents = PAPER_DOCUMENTS if name == "trading_documents" else {}
        rounds = 2 if documents else 1
        return trading_days(num_queries, num_out, words, rounds=rounds, documents=documents)
    sampling = _sampling(num_out)
    each = range(num_queries)
    task = {
        "context": [text(f"context {i}", words) for i in each],
        "question": [text(f"question {i}", 12) for i in each],
    }
    numbers = range(1, _CHUNKS + 1)
    chunks = {f"chunk_{c}": [text(f"{i} {c}", words) for i in each] for c in numbers}
    if given is not None:
        task = chunks = given
    graphs = {
        "map_reduce": lambda: build([map_reduce(_ROLES[:4], sampling=sampling)]).compile(**task),
        "debate": lambda: build(debate(_ROLES[:3], sampling=sampling)).compile(**task),
        "reflection": lambda: build([reflection(_ROLES[:2], sampling=sampling)]).compile(**task),
        "critics": lambda: build([reflection(_ROLES[:2], in_turn=True, sampling=sampling)]).compile(
            **task
        ),
        "iterative": lambda: build([iterative_refinement(_CHUNKS, sampling=sampling)]).compile(
            **chunks
        ),
        "parallel": lambda: build(
            [parallel_chains(_ROLES[:4], _CHUNKS, sampling=sampling)]
        ).compile(**chunks),
    }
    return Workload(graphs[name]())


def trading_days(
    num_queries: int,
    num_out: int,
    words: int,
    *,
    traders: int = 8,
    rounds: int = 1,
    documents: Mapping[str, int] | None = None,
) -> Workload:
    """A stock a query, on the second of two days.

    Args:
        traders: chains of a trader and three risk managers; up to 8.
        rounds: of the debates.
        documents: of each analyst; one, if it is left out.
    """
    counts, sampling = documents or {}, _sampling(num_out)
    graph = build([trading(_ROLES[:traders], rounds=rounds, documents=counts, sampling=sampling)])
    first, second = (_desk(day, num_queries, words, counts) for day in (1, 2))
    return Workload(graph.compile(**second), graph.compile(**first))


def _desk(
    day: int, num_queries: int, words: int, counts: Mapping[str, int]
) -> dict[str, list[str]]:
    """What the analysts read."""
    each = range(num_queries)
    desk = {"ticker": [f"T{i}" for i in each]}
    for kind in ANALYSTS:
        edition = day if kind in _NEW_EVERY_DAY else 1
        count = counts.get(kind, 1)
        for name in [f"{kind}_{number}" for number in range(1, count + 1)] if count > 1 else [kind]:
            desk[name] = [text(f"{name} {i} of day {edition}", words) for i in each]
    return desk


def _sampling(num_out: int) -> dict[str, object]:
    return {"temperature": 0.0, "max_tokens": num_out, "ignore_eos": True}
