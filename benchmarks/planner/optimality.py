# SPDX-License-Identifier: Apache-2.0
"""Schedules against the optimum, on the paper's seven small configurations (its tables 6 and 7).

    python -m benchmarks.planner.optimality --seconds 60

A gap is measured against the solver's lower bound, so where the optimum is not proven it is an
upper limit of the gap.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.record import record, write_csv
from benchmarks.planner.data import role, text
from benchmarks.planner.optimum import Optimum, optimum
from benchmarks.planner.tables import OPTIMA
from vllm_choreo.planner import CompiledGraph, CostModel, Profile, build
from vllm_choreo.planner.patterns import (
    debate,
    iterative_refinement,
    map_reduce,
    parallel_chains,
    reflection,
)
from vllm_choreo.planner.physical.cost import Calls
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Plan, Target

CAPACITY = 8192.0  # tokens of KV cache, as in the paper
_ROLES = [role(name) for name in ("an economist", "a lawyer", "an engineer")]
# Words of a multiple-choice question, of a page with tables, and of ten reviews.
_MMLU, _TATQA, _REVIEWS = 60, 400, 500


@dataclass(frozen=True)
class Case:
    """A configuration: its batch, and the mean tokens of its operators' answers."""

    compiled: CompiledGraph
    profile: Profile


def _questions(num_queries: int, words: int) -> dict[str, list[str]]:
    return {
        "context": [text(f"context {i}", words) for i in range(num_queries)],
        "question": [text(f"question {i}", 20) for i in range(num_queries)],
    }


def _chunks(num_queries: int, count: int) -> dict[str, list[str]]:
    return {
        f"chunk_{c}": [text(f"reviews {i} {c}", _REVIEWS) for i in range(num_queries)]
        for c in range(1, count + 1)
    }


CASES: dict[str, Callable[[], CompiledGraph]] = {
    "MapRed, MMLU": lambda: build([map_reduce(_ROLES)]).compile(**_questions(4, _MMLU)),
    "MapRed, TAT-QA": lambda: build([map_reduce(_ROLES)]).compile(**_questions(2, _TATQA)),
    "Debate, MMLU": lambda: build(debate(_ROLES)).compile(**_questions(4, _MMLU)),
    "Debate, TAT-QA": lambda: build(debate(_ROLES)).compile(**_questions(2, _TATQA)),
    "Reflect, TAT-QA": lambda: build([reflection(_ROLES[:2])]).compile(**_questions(2, _TATQA)),
    "Iterative, Amazon": lambda: build([iterative_refinement(2)]).compile(**_chunks(2, 2)),
    "Parallel, Amazon": lambda: build([parallel_chains(_ROLES, 2)]).compile(**_chunks(2, 2)),
}


def case(name: str, seed: int = 0) -> Case:
    """A configuration with lengths of answers that a profile would have measured."""
    compiled = CASES[name]()
    chosen = random.Random(f"{name} {seed}")
    profile = Profile()
    for node in compiled.graph.nodes:
        if node.kind == "llm":
            profile.add(node.name, float(chosen.randint(120, 320)))
    return Case(compiled, profile)


def query_by_query(plan: Plan, calls: Sequence[int]) -> list[int]:
    return sorted(calls, key=lambda call: (plan.tasks[call].query, call))


def operator_by_operator(plan: Plan, calls: Sequence[int]) -> list[int]:
    return sorted(calls, key=lambda call: (plan.tasks[call].node, call))


def at_random(calls: Calls, model: CostModel) -> list[int]:
    """Any call that can run (LangGraph), in one draw."""
    chosen = random.Random(0)
    return _online(calls, model, lambda last, ready: chosen.choice(sorted(ready)))


def longest_shared_prefix(calls: Calls, model: CostModel) -> list[int]:
    """Of the calls that can run, the one that shares most with the last one (LSPF, SGLang)."""

    def shared(last: int | None, call: int) -> float:
        return calls.tree.total(call) - calls.tree.new_tokens(last, call)

    return _online(
        calls, model, lambda last, ready: max(sorted(ready), key=lambda c: shared(last, c))
    )


def _online(
    calls: Calls, model: CostModel, choose: Callable[[int | None, set[int]], int]
) -> list[int]:
    """Order in which calls are begun by who knows only those that can run now."""
    order: list[int] = []
    clock = 0.0
    answered: dict[int, float] = {}
    while len(order) < len(calls.num_out):
        free = {
            call: max((answered[other] for other in calls.depends[call]), default=0.0)
            for call in calls.num_out
            if call not in answered and all(other in answered for other in calls.depends[call])
        }
        clock = max(clock, min(free.values()))
        call = choose(order[-1] if order else None, {c for c, at in free.items() if at <= clock})
        clock += calls.usage(model, order[-1] if order else None, call)
        answered[call] = clock + model.delay(calls.num_out[call])
        order.append(call)
    return order


def totals(given: Case, seconds: float) -> tuple[dict[str, float], Optimum]:
    """Token steps of each way to order the calls, and the optimum."""
    model = CostModel(capacity=CAPACITY)
    plan = make_plan(given.compiled, Target(cost=model, profile=given.profile))
    calls: Calls = plan.calls
    names = sorted(calls.num_out)
    orders = {
        "query by query": query_by_query(plan, names),
        "operator by operator": operator_by_operator(plan, names),
        "random": at_random(calls, model),
        "longest shared prefix": longest_shared_prefix(calls, model),
    }
    found = {way: calls.timetable([order], model).total for way, order in orders.items()}
    found["planner"] = plan.table.total
    return found, optimum(calls, model, plan.table.total, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the solver, each")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    gaps: list[float] = []
    rows: list[dict[str, object]] = []
    for name in arguments.case or CASES:
        found, best = totals(case(name, arguments.seed), arguments.seconds)
        gap = {way: 100 * (steps / best.bound - 1) for way, steps in found.items()}
        gaps.append(gap["planner"])
        shown = ", ".join(f"{way} {found[way]:.1f} (+{gap[way]:.1f} %)" for way in found)
        proven = "proven" if best.proven else f"bound; best found {best.total:.1f}"
        steps = {way: round(total, 2) for way, total in found.items()}
        of_optimum = {"bound": round(best.bound, 2), "proven": best.proven}
        rows += [
            {"case": name, "way": way, "steps": total, "gap": round(gap[way], 2), **of_optimum}
            for way, total in steps.items()
        ]
        write_csv(OPTIMA, rows, **record())
        print(f"{name}: optimum {best.bound:.1f} ({proven}); {shown}", flush=True)
    print(f"gap: mean {sum(gaps) / len(gaps):.2f} %, largest {max(gaps):.2f} %")


if __name__ == "__main__":
    main()
