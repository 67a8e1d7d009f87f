# SPDX-License-Identifier: Apache-2.0
"""How far choreographed plans are from the text, call by call and in what they answer.

    python -m benchmarks.planner.agreement [--workflow debate ...] [--queries 2] [--repair first:8]

Each workflow is run as text; then, with the text's tokens forced on every call, as a choreographed
plan, without and with repair. At each token the distributions over the whole vocabulary are
compared. Then the plan answers freely, and its results are compared with the text's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.harness.engine import FORCED, set_environment, start_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.planner.agreement.forced import ForcedWorker
from benchmarks.planner.agreement.tables import FREE, NAME, TABLES
from benchmarks.planner.rivals.workloads import NAMES, add_sizes, asked_workload
from vllm_choreo.lab.study.divergence import kl_per_token
from vllm_choreo.planner import CompiledGraph, Planner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser)
    parser.set_defaults(queries=2)
    parser.add_argument("--repair", action="append", help="rules, beside none")
    args = parser.parse_args()
    set_environment()
    llm = start_engine(logits_processors=[FORCED])
    rows: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    for name in args.workflow or NAMES:
        name, one = asked_workload(name, args)
        batch = one.batch
        said, results = _text(llm, batch)
        what = {"workflow": name, "queries": args.queries}
        for rule in [None, *(args.repair or ["first:8"])]:
            way = {**what, "way": f"choreographed, {rule or 'no repair'}"}
            rows += [{**way, **row} for row in _compared(llm, batch, said, rule)]
            free += [{**way, **row} for row in _answered(llm, batch, results, rule)]
            write_csv(NAME, rows, **record())
            write_csv(FREE, free, **record())
    print(as_text(TABLES.values()))
    return 0


def _run(llm: Any, batch: CompiledGraph, mode: str, said: Any, **options: Any) -> tuple[Any, Any]:
    """Run a plan; return its worker and its results. Text is an exact plan in mode "baseline"."""
    from vllm_choreo import Choreography

    semantics = "exact" if mode == "baseline" else "choreo"
    with Choreography(llm, mode=mode) as c:
        worker = ForcedWorker(c, said, **options)
        planner = Planner(worker, semantics=semantics)
        for node in batch.graph.nodes:
            if node.kind == "llm":
                planner.profile.add(node.name, float(node.attrs["sampling"]["max_tokens"]))
        return worker, list(planner.invoke(batch))


def _text(llm: Any, batch: CompiledGraph) -> tuple[dict[str, tuple[int, ...]], list[Any]]:
    """Tokens of each prompt's answer, and the results, where every prompt is text."""
    worker, results = _run(llm, batch, "baseline", None)
    return worker.answered, results


def _compared(llm: Any, batch: CompiledGraph, said: Any, rule: str | None) -> list[dict[str, Any]]:
    """A row for each call: `first`, the tokens before one whose likeliest is another."""
    base, _ = _run(llm, batch, "baseline", said)
    plan, _ = _run(llm, batch, "choreo", said, repair=rule)
    rows = []
    for call, prompt in enumerate(base.distributions):
        one, other = base.distributions[prompt], plan.distributions[prompt]
        same = one.argmax(axis=1) == other.argmax(axis=1)
        rows.append(
            {
                "call": call,
                "exact": plan.exact[prompt],
                "tokens": len(same),
                "first": len(same) if same.all() else int(same.argmin()),
                "kl": float(kl_per_token(one, other).mean()),
                "top1": float(same.mean()),
            }
        )
    return rows


def _answered(
    llm: Any, batch: CompiledGraph, expected: list[Any], rule: str | None
) -> list[dict[str, Any]]:
    """A row for each result of a plan that answers freely: is it the text's, and up to where?"""
    _, results = _run(llm, batch, "choreo", None, repair=rule)
    rows = []
    for query, (one, other) in enumerate(zip(expected, results, strict=True)):
        texts = zip(_texts(one), _texts(other), strict=True)
        for number, (mine, theirs) in enumerate(texts):
            begin = sum(1 for _ in _alike(mine.split(), theirs.split()))
            shown = {"query": query, "result": number, "same": int(mine == theirs)}
            rows.append({**shown, "words": len(mine.split()), "alike": begin})
    return rows


def _texts(result: Any) -> list[str]:
    return list(result.values()) if isinstance(result, dict) else [result]


def _alike(mine: list[str], theirs: list[str]) -> Any:
    """Yield words until they differ."""
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return
        yield one


if __name__ == "__main__":
    sys.exit(main())
