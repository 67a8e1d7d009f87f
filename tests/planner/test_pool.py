# SPDX-License-Identifier: Apache-2.0
"""Where an order of calls matters: not if all fits the KV cache; where it does not, by blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.graphs import RandomGraph
from vllm_choreo.planner import CompiledGraph, CostModel, EngineModel, Profile, build
from vllm_choreo.planner.execute.ready import ReadyCalls
from vllm_choreo.planner.patterns import debate
from vllm_choreo.planner.physical.cost import Calls
from vllm_choreo.planner.physical.pool import (
    ModelEngine,
    PoolRun,
    by_rank,
    least_encoded,
    working_set,
)
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Plan, Target


def planned(compiled: CompiledGraph, model: EngineModel | None = None, **options: object) -> Plan:
    profile = Profile()
    for node in compiled.graph.nodes:
        if node.kind == "llm":
            profile.add(node.name, 40.0)
    return make_plan(compiled, Target(cost=CostModel(engine=model), profile=profile, **options))  # type: ignore[arg-type]


def run(calls: Calls, order: Sequence[int], capacity: float, width: int = 4) -> PoolRun:
    ranks = {call: (float(rank),) for rank, call in enumerate(order)}
    return ModelEngine(calls, EngineModel(capacity, width)).run(by_rank(ranks))


def text(name: str, num_words: int) -> str:
    """Words that no other text has."""
    return " ".join(f"{name} {number}" for number in range(num_words // 2))


def debates(num_queries: int) -> CompiledGraph:
    roles = [text(f"agent{i}", 40) for i in range(3)]
    context = [text(f"context{i}", 300) for i in range(num_queries)]
    return build(debate(roles)).compile(context=context, question="Why?")


def distinct_prefixes(plan: Plan) -> float:
    """Tokens of distinct beginnings of prompts, word by word, by their definition."""
    seen: dict[tuple[str | int, ...], float] = {}
    for call, symbols in plan.prompts.items():
        path: list[str | int] = []
        for symbol in symbols:
            characters = [*symbol] if isinstance(symbol, str) else [symbol]
            for one in characters:
                path.append(one)
                weight = plan.weigh(one)
                seen.setdefault(tuple(path), weight)
        seen.pop((*path, call), None)
    answers = {(*flat(plan, call), call) for call in plan.prompts}
    return sum(weight for path, weight in seen.items() if path not in answers)


def flat(plan: Plan, call: int) -> list[str | int]:
    """A prompt character by character."""
    found: list[str | int] = []
    for symbol in plan.prompts[call]:
        found += [*symbol] if isinstance(symbol, str) else [symbol]
    return found


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 5))
def test_where_all_fits_no_order_encodes_less_than_another(seed: int, width: int) -> None:
    plan = planned(RandomGraph(seed, num_ops=10).compile(3))
    calls = plan.calls
    order, chosen = list(calls.num_out), random.Random(seed)
    least = least_encoded(calls)
    for _ in range(3):
        chosen.shuffle(order)
        ran = run(calls, order, working_set(calls), width)
        assert ran.encoded == pytest.approx(least)
        assert ran.prompt == pytest.approx(sum(map(calls.tree.total, order)))
        small = run(calls, order, 3 * max(map(calls.tree.total, order), default=1.0) + 200, width)
        assert small.prompt + 1e-6 >= small.encoded >= least - 1e-6


def test_the_least_that_is_encoded_is_every_beginning_once() -> None:
    plan = planned(debates(2))
    # Text of which words are shared only in part is shared by whole words in the tree.
    assert least_encoded(plan.calls) == pytest.approx(distinct_prefixes(plan), rel=0.02)


def test_calls_begin_after_those_that_they_read_and_as_many_as_fit() -> None:
    plan = planned(debates(4))
    begun: list[int] = []
    largest = max(plan.calls.tree.total(call) + 40 for call in plan.prompts)
    model = EngineModel(2.5 * largest, width=8)

    def choose(engine: ModelEngine) -> int | None:
        call = next(iter(engine.ready), None)
        if call is not None:
            assert set(plan.calls.depends[call]) <= engine.done
            begun.append(call)
        return call

    ran = ModelEngine(plan.calls, model).run(choose)
    assert set(begun) == set(plan.prompts)
    assert max(step[2] for step in ran.steps) <= 8
    assert max(step[3] for step in ran.steps) <= model.capacity
    with pytest.raises(ValueError, match="does not fit"):
        ModelEngine(plan.calls, EngineModel(largest / 2)).run(choose)


def test_blocks_of_queries_keep_what_goes_on() -> None:
    """Of a debate whose prompts do not fit, blocks find nearly all that could be found."""
    compiled = debates(16)
    plain = planned(compiled)
    capacity = 0.4 * working_set(plain.calls)
    model = EngineModel(capacity, width=4, step=4.0, decode=2.5)
    blocks = planned(compiled, model)
    assert sorted(blocks.table.orders[0]) == sorted(plain.table.orders[0])
    assert blocks.table.orders != plain.table.orders
    found = [run(p.calls, p.table.orders[0], capacity) for p in (plain, blocks)]
    best = 1 - least_encoded(plain.calls) / found[0].prompt
    assert found[1].hit_rate > 0.95 * best > 1.5 * found[0].hit_rate
    for order in blocks.table.orders:
        at = {call: rank for rank, call in enumerate(order)}
        assert all(at[other] < at[call] for call in order for other in plain.calls.depends[call])


def test_blocks_on_several_workers_do_not_wait_for_one_another() -> None:
    compiled = debates(8)
    plain = planned(compiled, num_workers=2)
    blocks = planned(compiled, EngineModel(4000.0, 4, step=4.0, decode=2.5), num_workers=2)
    assert list(map(sorted, blocks.table.orders)) == list(map(sorted, plain.table.orders))
    assert blocks.table.orders != plain.table.orders and set(blocks.table.end) == set(plain.prompts)


def test_where_all_fits_there_are_no_blocks() -> None:
    compiled = debates(4)
    plain = planned(compiled)
    model = EngineModel(1.01 * working_set(plain.calls))
    assert planned(compiled, model).table.orders == plain.table.orders
    assert planned(compiled, EngineModel(10.0)).table.orders == plain.table.orders


def test_of_the_calls_that_can_run_the_query_with_most_of_them_comes_first() -> None:
    plan = planned(debates(3), dispatch="pending")
    query = {call: plan.tasks[call].query for call in plan.prompts}
    first = [call for call in plan.prompts if not plan.calls.depends[call]]
    ready = ReadyCalls(plan, 0)
    given = [call for call in first if query[call] != 0][:4] + [c for c in first if query[c] == 0]
    given = sorted(given, key=lambda call: -plan.rank[call])
    for call in given:
        ready.push(call)
    sequence = {node: i for i, nodes in enumerate(plan.sequences[0]) for node in nodes}
    left = list(given)
    while ready:
        call = ready.pop()
        here = min(sequence[plan.tasks[c].node] for c in left)
        assert sequence[plan.tasks[call].node] == here
        pending = [query[c] for c in left if sequence[plan.tasks[c].node] == here]
        assert pending.count(query[call]) == max(map(pending.count, pending))
        left.remove(call)
    assert not left
