# SPDX-License-Identifier: Apache-2.0
"""The rivals of plans run the very calls: whatever the order, every operator has the same value."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from benchmarks.planner.rivals.__main__ import engine_options
from benchmarks.planner.rivals.state_graph import langgraph
from benchmarks.planner.rivals.text import WIDTH, Text
from benchmarks.planner.rivals.ways import (
    Runner,
    agent_at_a_time,
    dataflow,
    first_come,
    gangs_by_prefix,
    longest_shared,
    num_shared,
    operator_by_operator,
    query_by_query,
)
from benchmarks.planner.rivals.workloads import NAMES, trading_days, workload
from tests.planner.facades import AsyncDigestFacade
from vllm_choreo.planner import FacadeWorker, naive

RUNNERS: dict[str, Runner] = {
    "query by query": query_by_query,
    "operator by operator": operator_by_operator,
    "as they come": partial(dataflow, choose=first_come),
    "longest shared prefix": partial(dataflow, choose=longest_shared),
    "an agent at a time": partial(dataflow, choose=agent_at_a_time),
    "gangs by prefix": partial(dataflow, choose=gangs_by_prefix),
    "LangGraph": langgraph,
}


@pytest.mark.parametrize("name", NAMES)
def test_rivals_say_what_the_naive_run_says(name: str) -> None:
    compiled = workload(name, 2, 4, 20).batch
    expected = naive(compiled, AsyncDigestFacade("baseline"))
    outputs = compiled.graph.outputs
    num_calls = set()
    for way, runner in RUNNERS.items():
        text = Text(FacadeWorker(AsyncDigestFacade("baseline"), width=WIDTH), compiled)
        values = asyncio.run(runner(text))
        results = [{key: of[node] for key, node in outputs.items()} for of in values]
        single = [result if len(outputs) > 1 else next(iter(result.values())) for result in results]
        assert single == list(expected), way
        num_calls.add(len(text.answers))
    assert len(num_calls) == 1, "each runs the same calls"


def test_half_of_what_analysts_read_is_the_same_the_day_before() -> None:
    one = trading_days(3, 4, 20, traders=2, rounds=2)
    assert one.before is not None
    same = [name for name, texts in one.batch.inputs.items() if texts == one.before.inputs[name]]
    names = {one.batch.graph.nodes[number].name for number in same}
    assert names == {"ticker", "social", "fundamentals"}


@pytest.mark.parametrize("pool", [1024, 4096, 1 << 20])
def test_the_longest_request_fits_a_small_pool(pool: int) -> None:
    options = engine_options(one_process=True, pool=pool)
    free = options["num_gpu_blocks_override"] - 1  # vLLM keeps a block for itself
    assert options["max_model_len"] <= free * options["block_size"] < pool
    assert engine_options(one_process=False, pool=None)["max_model_len"] == 4096


def test_shared_prefixes() -> None:
    for one, other, count in (("", "a", 0), ("ab", "ab", 2), ("abc", "abd", 2), ("b", "ab", 0)):
        assert num_shared(one, other) == count
