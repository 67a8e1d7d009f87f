# SPDX-License-Identifier: Apache-2.0
"""Ways to choose the next call: those of the paper's comparisons, written anew, and plans'.

| way | what is begun next |
|---|---|
| query by query | one call after the other |
| operator by operator | an operator's calls, once all of the one before are answered |
| random | any call that can run |
| as they come | the call that could run first (LangGraph) |
| longest shared prefix | of those that can run, the one that finds most in the cache (SGLang) |
| an agent at a time | as they come, but one call of a role at a time (AgentScope's actors) |
| gangs by prefix | calls of one stage that begin alike, together (Parrot) |
| plan | in the plan's order |
| plan, most pending | in its sequences, of the query with most calls that can run (the paper) |
"""

from __future__ import annotations

import random
from collections import Counter

from vllm_choreo.planner.physical.pool import Choose, ModelEngine, by_rank
from vllm_choreo.planner.physical.radix import Symbol, TreeNode
from vllm_choreo.planner.plan import Plan


def query_by_query(plan: Plan) -> Choose:
    ranks = {call: (float(plan.tasks[call].query), float(call)) for call in plan.prompts}
    inner = by_rank(ranks)
    return lambda engine: None if engine.running else inner(engine)


def operator_by_operator(plan: Plan) -> Choose:
    left = Counter(plan.tasks[call].node for call in plan.prompts)
    inner = by_rank({c: (float(plan.tasks[c].node), float(c)) for c in plan.prompts})
    counted: set[int] = set()

    def choose(engine: ModelEngine) -> int | None:
        for call in engine.done - counted:
            counted.add(call)
            left[plan.tasks[call].node] -= 1
        current = min(node for node, count in left.items() if count)
        following = inner(engine)
        if following is None or plan.tasks[following].node != current:
            return None
        return following

    return choose


def at_random(plan: Plan) -> Choose:
    chosen = random.Random(0)
    return by_rank({call: (chosen.random(),) for call in plan.prompts})


def as_they_come(plan: Plan) -> Choose:
    return lambda engine: next(iter(engine.ready), None)


def longest_shared_prefix(plan: Plan) -> Choose:
    def choose(engine: ModelEngine) -> int | None:
        ready = engine.ready
        return max(ready, key=lambda call: engine.pool.hits(engine.path(call)), default=None)

    return choose


def agent_at_a_time(plan: Plan) -> Choose:
    def role(call: int) -> Symbol:
        return plan.prompts[call][0]  # up to the end of the system's turn

    def choose(engine: ModelEngine) -> int | None:
        busy = {role(call) for call in engine.running}
        return next((call for call in engine.ready if role(call) not in busy), None)

    return choose


def gangs_by_prefix(plan: Plan) -> Choose:
    levels: dict[int, int] = {}
    for call in plan.calls.num_out:  # each after those on which it depends
        levels[call] = 1 + max((levels[c] for c in plan.calls.depends[call]), default=0)
    ends = {call: plan.calls.tree.end[call].path() for call in plan.prompts}
    gangs: dict[TreeNode, float] = {}
    for path in ends.values():
        gangs.setdefault(path[0], float(len(gangs)))
    return by_rank({c: (float(levels[c]), gangs[ends[c][0]], float(c)) for c in plan.prompts})


def plan_order(plan: Plan) -> Choose:
    return by_rank({call: (float(rank),) for call, rank in plan.rank.items()})


def most_pending(plan: Plan) -> Choose:
    sequence = {node: i for i, nodes in enumerate(plan.sequences[0]) for node in nodes}

    def choose(engine: ModelEngine) -> int | None:
        first = min((sequence[plan.tasks[c].node] for c in engine.ready), default=0)
        here = [c for c in engine.ready if sequence[plan.tasks[c].node] == first]
        pending = Counter(plan.tasks[c].query for c in here)
        return min(here, key=lambda c: (-pending[plan.tasks[c].query], plan.rank[c]), default=None)

    return choose


ORDERS = {
    "query by query": query_by_query,
    "operator by operator": operator_by_operator,
    "random": at_random,
    "as they come": as_they_come,
    "longest shared prefix": longest_shared_prefix,
    "an agent at a time": agent_at_a_time,
    "gangs by prefix": gangs_by_prefix,
    "plan": plan_order,
    "plan, most pending": most_pending,
}
