# SPDX-License-Identifier: Apache-2.0
"""The logical plan: rewriting never changes an output, and saves what it should."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from tests.planner.graphs import RandomGraph, planner_without, tasks_of
from vllm_choreo.planner import AnswerCache, Msg, Planner, build, invoke, naive, ops
from vllm_choreo.planner.execute import shared_messages
from vllm_choreo.planner.logical.graph import CompiledGraph


def decodes(compiled: CompiledGraph, *without: str) -> int:
    facade = DigestFacade("baseline")
    planner_without(facade, *without).invoke(compiled)
    return len(facade.decodes)


@given(
    seed=st.integers(0, 10**6),
    prune=st.booleans(),
    merge=st.booleans(),
    mode=st.sampled_from(["baseline", "exact", "choreo"]),
    batch=st.integers(1, 5),
    turns=st.booleans(),
)
def test_rewriting_never_changes_an_output(
    seed: int, prune: bool, merge: bool, mode: str, batch: int, turns: bool
) -> None:
    compiled = RandomGraph(seed, turns=turns).compile(batch)
    expected = naive(compiled, DigestFacade("baseline"))
    facade = DigestFacade(mode)
    without = [*([] if prune else ["prune"]), *([] if merge else ["merge"])]
    found = planner_without(facade, *without).invoke(compiled)
    assert list(found) == expected
    assert len(facade.decodes) <= len(compiled.graph.nodes) * batch


@given(
    seed=st.integers(0, 10**6),
    semantics=st.sampled_from(["exact", "choreo"]),
    turns=st.booleans(),
    max_shared=st.sampled_from([1, 4, 1000]),
)
def test_answers_do_not_depend_on_how_calls_overlap(
    seed: int, semantics: str, turns: bool, max_shared: int
) -> None:
    compiled = RandomGraph(seed, num_ops=25, turns=turns).compile(4)
    expected = naive(compiled, DigestFacade("baseline"))
    for facade in (DigestFacade("choreo"), AsyncDigestFacade("choreo")):
        with patch.object(shared_messages, "MAX_SHARED", max_shared):
            assert list(invoke(compiled, facade, semantics=semantics)) == expected
        # All but what is pinned is freed, and nothing twice.
        made = {f"digest/{number}" for number in range(len(facade.calls))}
        assert made - facade.freed == facade.pinned


@given(seed=st.integers(0, 10**6))
def test_sampled_answers_are_never_merged(seed: int) -> None:
    compiled = RandomGraph(seed, sampled=True).compile(3)
    plan = tasks_of(compiled)
    plain = tasks_of(compiled, "merge")
    for name, kinds in (("merged", plan), ("plain", plain)):
        sampled = [t for t in kinds.tasks if not kinds.graph.nodes[t.node].deterministic]
        assert len({(t.node, t.query) for t in sampled}) == len(sampled), name
        assert all(t.num_queries == 1 for t in sampled)
    count = sum(not plan.node(t).deterministic for t in plan.asked)
    assert count == sum(not plain.node(t).deterministic for t in plain.asked)


@given(seed=st.integers(0, 10**6), sampled=st.booleans())
def test_the_prompt_cache_never_changes_an_output(seed: int, sampled: bool) -> None:
    compiled = RandomGraph(seed, sampled=sampled).compile(3)
    planner = Planner(facade := DigestFacade("choreo"), cache=AnswerCache())
    first, num_first = planner.invoke(compiled), len(facade.decodes)
    again, num_again = planner.invoke(compiled), len(facade.decodes) - num_first
    if not sampled:
        assert list(again) == list(first) == naive(compiled, DigestFacade("baseline"))
        assert num_again == 0
    plan = tasks_of(compiled)
    if num_first:
        kinds = [plan.node(task).deterministic for task in plan.asked]
        assert num_again >= sum(not kind for kind in kinds) * (num_first == len(kinds))


def test_equal_subgraphs_are_one() -> None:
    a = ops.placeholder("a")

    def chain() -> object:
        draft = ops.llm([Msg("user", ops.fmt("Answer: {}", a))])
        return ops.llm([Msg("user", ops.fmt("Improve: {}", draft))])

    both = build([ops.concat(chain(), chain(), sep="\n")])  # type: ignore[arg-type]
    compiled = both.compile(a=["x", "y", "x", "x"])
    assert decodes(compiled) == 4
    assert decodes(compiled, "merge") == 16


def test_equal_prompts_are_one_though_the_graph_does_not_tell() -> None:
    a, b = ops.placeholder("a"), ops.placeholder("b")
    one = ops.llm([Msg("user", ops.fn(str.upper, a))])
    other = ops.llm([Msg("user", ops.fn(str.strip, b))])
    compiled = build([one, other]).compile(a="x", b=" X ")
    assert decodes(compiled) == 1
    assert decodes(compiled, "merge") == 2


def test_what_no_output_needs_is_not_run() -> None:
    a = ops.placeholder("a")
    seen = []
    used = ops.llm([Msg("user", a)], name="used")
    unused = ops.llm([Msg("user", ops.fn(lambda text: seen.append(text) or "", a))], name="unused")
    graph = build([used, unused])
    pruned = type(graph)(graph.nodes, {"used": graph.outputs["used"]})
    assert decodes(pruned.compile(a=["x", "y"])) == 2
    assert seen == []


def test_a_switch_whose_key_is_known_keeps_one_case() -> None:
    a, key = ops.placeholder("a"), ops.placeholder("key")
    yes, no = ops.llm([Msg("user", a)]), ops.llm([Msg("user", ops.fmt("Not {}", a))])
    compiled = build([ops.switch(key, {"yes": yes}, no)]).compile(a="x", key=["yes", "no", "yes"])
    plan = tasks_of(compiled)
    assert [task.node for task in plan.tasks if plan.graph.nodes[task.node].kind == "switch"] == []
    assert len(plan.asked) == 2


def test_what_does_nothing_is_passed_through() -> None:
    a = ops.placeholder("a")
    same = ops.output(ops.concat(ops.slice(ops.fmt("{}", a), 0)), "same")
    plan = tasks_of(build([same]).compile(a=["x", "y"]))
    assert len(plan.tasks) == 2 and len(plan.known) == 2


@pytest.mark.parametrize("size", [1, 2000])
def test_long_chains_need_no_recursion(size: int) -> None:
    text = ops.placeholder("a")
    for _ in range(size):
        text = ops.fmt("{}+", text)
    compiled = build([text]).compile(a="")
    assert list(invoke(compiled, DigestFacade())) == ["+" * size]
