# SPDX-License-Identifier: Apache-2.0
"""Explanation of a plan as text: what is shared, how it is read, where and when calls run."""

from __future__ import annotations

from collections import Counter

from vllm_choreo.planner.execute.run_stats import RunStats
from vllm_choreo.planner.logical.nodes import BoundGraph
from vllm_choreo.planner.physical.cost import CostModel
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Plan, Target

_MAX_ROWS = 40


def explain(
    compiled: BoundGraph,
    target: Target | None = None,
    *,
    plan: Plan | None = None,
    stats: RunStats | None = None,
) -> str:
    """Explain the plan of a batch as text.

    Args:
        compiled: the graph and its inputs.
        target: semantics, workers and costs that a plan is made for.
        plan: plan that was made or run; None: it is made here.
        stats: measurements of its run; None: it was not run.
    """
    target = target or Target()
    plan = plan or make_plan(compiled, target)
    parts = [_tasks(plan), _schedule(plan, target.cost), _operators(plan), _edges(plan)]
    parts += [_sequences(plan)] if plan.sequences else []
    parts += [_measured(stats)] if stats is not None else []
    return "\n\n".join(parts) + "\n"


def _tasks(plan: Plan) -> str:
    num_queries, num_operators = plan.batch.batch_size, len(plan.graph.nodes)
    kinds = Counter(plan.node(task).kind for task in plan.needed)
    asked = sum(
        task.num_queries for task in plan.tasks if plan.graph.nodes[task.node].kind == "llm"
    )
    return (
        f"{num_queries} queries x {num_operators} operators = "
        f"{num_queries * num_operators} instances -> {len(plan.needed)} tasks "
        f"({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})\n"
        f"{asked} calls in the naive run -> {len(plan.prompts)} calls; "
        f"{plan.num_fetched} values fetched from the answer cache"
    )


def _schedule(plan: Plan, model: CostModel) -> str:
    naive = plan.calls.timetable(_query_by_query(plan), model)
    table = plan.table
    total = sum(plan.calls.tree.total(call) for call in plan.prompts)
    new = sum(table.num_new.values())
    shared = 100 * (1 - new / total) if total else 0.0
    loads = ", ".join(f"{len(order)} calls" for order in table.orders)
    return (
        f"estimated: {table.total:.1f} token steps, query by query {naive.total:.1f}; "
        f"{shared:.0f} % of {total:.0f} prompt tokens shared with the call before; "
        f"workers: {loads}; planned in {plan.seconds * 1000:.0f} ms"
    )


def _query_by_query(plan: Plan) -> list[list[int]]:
    tasks = plan.tasks
    return [
        sorted(order, key=lambda call: (tasks[call].query, call)) for order in plan.table.orders
    ]


def _operators(plan: Plan) -> str:
    rows = []
    calls = Counter(plan.tasks[call].node for call in plan.prompts)
    first: dict[int, int] = {}
    for call in plan.prompts:
        first.setdefault(plan.tasks[call].node, call)
    for number, count in list(calls.items())[:_MAX_ROWS]:
        node = plan.graph.nodes[number]
        call = first[number]
        cuts = plan.cuts.at.get(call, ())
        rows.append(
            [
                node.name,
                node.line,
                str(count),
                f"{plan.calls.tree.total(call):.0f}",
                f"{plan.calls.num_out[call]:.0f}",
                f"{len(cuts)} links" if cuts else "-",
                "greedy" if node.deterministic else "sampled: never merged or cached",
            ]
        )
    head = ["operator", "line", "calls", "prompt", "answer", "shared beginning", "decoding"]
    return _table(head, rows, len(calls))


def _edges(plan: Plan) -> str:
    graph, behind = plan.graph, _gone_on(plan)
    rows = []
    for (number, source), choice in plan.choices.items():
        if (number, source) in behind:
            shared = f"prompt of {graph.nodes[behind[number, source]].name}"
            rows.append(
                [graph.nodes[number].name, graph.nodes[source].name, "goes on", shared, "-"]
            )
            continue
        if graph.nodes[source].kind in ("placeholder", "data") and choice.how != "message":
            continue
        costs = ", ".join(f"{way} {cost:.0f}" for way, cost in sorted(choice.costs.items()))
        shared = f"{choice.readers} operators" if choice.readers > 1 else "-"
        rows.append([graph.nodes[number].name, graph.nodes[source].name, choice.how, shared, costs])
    head = ["reader", "reads", "how", "same beginning", "tokens encoded per call, by way"]
    return _table(head, rows[:_MAX_ROWS], len(rows)) if rows else "no operator reads another"


def _gone_on(plan: Plan) -> dict[tuple[int, int], int]:
    """Operators whose prompt and answer others continue, by (reader, operator that it reads)."""
    tasks = plan.tasks
    found = {}
    for call, earlier in plan.goes_on.items():
        for symbol in (*plan.prompts[earlier], earlier):
            if isinstance(symbol, int):
                found[tasks[call].node, tasks[symbol].node] = tasks[earlier].node
    return found


def _sequences(plan: Plan) -> str:
    names = [node.name for node in plan.graph.nodes]
    lines = []
    for worker, nested in enumerate(plan.sequences):
        inner = " -> ".join("[" + ", ".join(names[n] for n in part) + "]" for part in nested)
        lines.append(f"worker {worker}: {inner}")
    return "soft schedule (inner sequences run query by query):\n" + "\n".join(lines)


def _measured(stats: RunStats) -> str:
    reused = 100 * stats.num_reused / stats.num_prompt if stats.num_prompt else 0.0
    return (
        f"measured: {stats.seconds:.2f} s; {stats.num_calls} calls, {stats.num_joined} joined, "
        f"{stats.num_fetched} fetched, {stats.num_retries} made again; {reused:.0f} % of "
        f"{stats.num_prompt} prompt tokens reused; {stats.num_out} tokens generated; "
        f"{stats.num_shared} shared messages, {stats.num_moved} moved; {stats.num_encoded} tokens "
        "of prompts encoded"
    )


def _table(head: list[str], rows: list[list[str]], count: int) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
             for row in [head, *rows]]  # fmt: skip
    more = [f"... {count - len(rows)} more"] if count > len(rows) else []
    return "\n".join([*lines, *more])
