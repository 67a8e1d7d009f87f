# SPDX-License-Identifier: Apache-2.0
"""The six workflows of the paper, over made-up inputs, as batches of queries."""

from __future__ import annotations

from benchmarks.planner.data import role, text
from vllm_choreo.planner import CompiledGraph, build
from vllm_choreo.planner.patterns import (
    debate,
    iterative_refinement,
    map_reduce,
    parallel_chains,
    reflection,
    trading,
)

_ROLES = [role(name, 60) for name in ("an economist", "a lawyer", "an engineer", "a historian")]
NAMES = ("map_reduce", "debate", "reflection", "iterative", "parallel", "trading")


def workloads(num_queries: int, num_out: int, words: int) -> dict[str, CompiledGraph]:
    """By `NAMES`; `words` are those of a context or a document."""
    sampling = {"temperature": 0.0, "max_tokens": num_out, "ignore_eos": True}
    each = range(num_queries)
    task = {
        "context": [text(f"context {i}", words) for i in each],
        "question": [text(f"question {i}", 12) for i in each],
    }
    chunks = {f"chunk_{c}": [text(f"{i} {c}", words) for i in each] for c in (1, 2, 3)}
    desk = {
        kind: [text(f"{kind} {i}", words) for i in each]
        for kind in ("market", "social", "news", "fundamentals")
    }
    tickers = [f"T{i}" for i in each]
    return {
        "map_reduce": build([map_reduce(_ROLES, sampling=sampling)]).compile(**task),
        "debate": build(debate(_ROLES[:3], sampling=sampling)).compile(**task),
        "reflection": build([reflection(_ROLES[:2], sampling=sampling)]).compile(**task),
        "iterative": build([iterative_refinement(3, sampling=sampling)]).compile(**chunks),
        "parallel": build([parallel_chains(_ROLES, 3, sampling=sampling)]).compile(**chunks),
        "trading": build([trading(_ROLES[:3], rounds=1, sampling=sampling)]).compile(
            ticker=tickers, **desk
        ),
    }
