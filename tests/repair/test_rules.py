# SPDX-License-Identifier: Apache-2.0
"""Rules of repair: which runs they choose, what they refuse, and their way over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.rules import Seen, rule_given, rule_of, rule_text
from vllm_choreo.repair.runs import TokenRanges, num_tokens
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.semantics.params import ChoreoParams

SIZE = 16


@st.composite
def _parent(draw: Any) -> Seen:
    start, length = draw(st.integers(0, 70)), draw(st.integers(1, 90))
    weights = st.lists(st.floats(0, 9), min_size=length, max_size=length)
    return Seen(start, start + length, draw(st.none() | weights))


PARENTS = st.lists(_parent(), max_size=4)
RULES: list[Any] = [
    *("first:1", "first:32", "all", "none"),
    *({"by": "first", "count": 3}, {"by": "layers", "layers": [[0, 1], [2, 5]]}),
    {"share": 0.0, "by": "random"},
    {"share": 0.3, "by": "random", "seed": 7},
    {"share": 1, "by": "random"},
    {"layers": [2, 5]},
    {"share": 0.2, "by": "attention"},
    {"reweight": [0.9, 1.0]},
]


def _tokens(runs: TokenRanges) -> set[int]:
    return {token for start, stop in runs for token in range(start, stop)}


@given(parents=PARENTS, rule=st.sampled_from(RULES))
def test_runs_lie_in_their_parents_in_order(parents: list[Seen], rule: Any) -> None:
    chosen = rule_of(rule).runs(parents, SIZE)
    assert len(chosen) == len(parents)
    for runs, parent in zip(chosen, parents, strict=True):
        ends = [end for run in runs for end in run]
        assert ends == sorted(set(ends)), "runs are ascending, not empty, and do not touch"
        assert _tokens(runs) <= set(range(parent.num_tokens))


@given(parents=PARENTS, count=st.integers(1, 100))
def test_first(parents: list[Seen], count: int) -> None:
    first = rule_of(f"first:{count}").runs(parents, SIZE)
    for parent, head in zip(parents, first, strict=True):
        assert _tokens(head) == set(range(min(count, parent.num_tokens)))


@given(parents=PARENTS, share=st.floats(0, 1), by=st.sampled_from(["random", "attention"]))
def test_blocks_are_whole_blocks_within_the_budget(
    parents: list[Seen], share: float, by: str
) -> None:
    chosen = rule_of({"share": share, "by": by}).runs(parents, SIZE)
    if by == "attention":  # parents of which none is known have no part in it
        known = [parent.attention is not None for parent in parents]
        assert all(is_known or not runs for is_known, runs in zip(known, chosen, strict=True))
        chosen = tuple(runs for is_known, runs in zip(known, chosen, strict=True) if is_known)
        parents = [parent for parent in parents if parent.attention is not None]
    total = sum(parent.num_tokens for parent in parents)
    spent = sum(num_tokens(runs) for runs in chosen)
    assert spent <= share * total
    for runs, parent in zip(chosen, parents, strict=True):
        for end in (end + parent.start for run in runs for end in run):
            assert end % SIZE == 0 or end in (parent.start, parent.stop)
    # What is left of the budget would not pay for any block that was left out.
    left = [
        stop - start
        for runs, parent in zip(chosen, parents, strict=True)
        for start, stop in parent.blocks(SIZE)
        if start not in _tokens(runs)
    ]
    assert not left or min(left) > share * total - spent - 1e-9


@given(parents=PARENTS, share=st.floats(0, 1))
def test_blocks_with_more_attention_come_first(parents: list[Seen], share: float) -> None:
    chosen = rule_of({"share": share, "by": "attention"}).runs(parents, SIZE)
    means: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for parent, runs in zip(parents, chosen, strict=True):
        if parent.attention is None:
            continue
        for start, stop in parent.blocks(SIZE):
            weight = sum(parent.attention[start:stop]) / (stop - start)
            means[start in _tokens(runs)].append((weight, stop - start))
    total = sum(size for group in means.values() for _, size in group)
    for weight, size in means[False]:  # there was no room for it beside those with more
        better = sum(n for w, n in means[True] if w >= weight - 1e-9)
        assert better + size > share * total - 1e-9


@given(parent=PARENTS.filter(bool), start=st.integers(0, 99), length=st.integers(1, 99))
def test_clipped_runs_end_with_their_parents(parent: list[Seen], start: int, length: int) -> None:
    rule = rule_of({"clipped": [[[start, start + length]]] * len(parent)})
    for seen, runs in zip(parent, rule.runs(parent, SIZE), strict=True):
        assert _tokens(runs) == set(range(start, start + length)) & set(range(seen.num_tokens))


def test_a_share_of_one_is_everything() -> None:
    parents = [Seen(5, 40), Seen(0, 16), Seen(16, 17)]
    assert rule_of({"share": 1, "by": "random"}).runs(parents, SIZE) == rule_of("all").runs(
        parents, SIZE
    )


@pytest.mark.parametrize(
    "rule", [*RULES, [[[0, 3], [5, 9]], []], {"clipped": [[[0, 3], [5, 9]], []]}]
)
def test_the_wire_carries_rules(rule: Any) -> None:
    params = ChoreoParams(parents=("a", "b"), repair=rule)
    again = ChoreoParams.from_extra_args(params.to_extra_args())
    assert again == params and again.repair == rule_of(rule)


@pytest.mark.parametrize("rule", [*RULES, [[[0, 3], [5, 9]], []]])
def test_rules_as_text(rule: Any) -> None:
    assert rule_of(rule_given(rule_text(rule))) == rule_of(rule)


@pytest.mark.parametrize(
    "text", ["best:3", "", "{", "[[0, 3]", "[" * 100_000, '{"share": 2, "by": "random"}', "7"]
)
def test_what_is_no_rule_as_text_is_refused(text: str) -> None:
    with pytest.raises(RepairError) as caught:
        rule_given(text)
    assert caught.value.parameter.startswith("repair")


def test_runs_are_sorted_and_joined() -> None:
    made = rule_of([[(5, 9), (0, 3), (3, 4)]])
    assert made.to_json() == {"by": "runs", "runs": (((0, 4), (5, 9)),)}


@pytest.mark.parametrize(
    "rule",
    [
        *("first", "first:", "first:0", "first:-1", "first:x", "last:16", "best:3", ""),
        *({}, {"share": 1.5, "by": "random"}, {"share": -0.1, "by": "random"}),
        *({"share": 0.1, "by": "keys"}, {"share": True, "by": "random"}, {"by": "random"}),
        *({"share": 0.1, "by": "random", "seed": "x"}, {"share": 0.1, "by": "random", "size": 3}),
        *(7, 0.3, [[(3, 3)]], [[(4, 2)]], [[(-1, 2)]], [[(0, 4), (3, 6)]], [[(0.0, 2)]]),
        *([[0, 3]], [["03"]], "none:3"),
        *({"reweight": [0.9]}, {"reweight": [0, 1]}, {"reweight": [0.9, True]}),
        *({"reweight": [1e-300, 1]}, {"reweight": [1, 11]}, {"reweight": [float("nan"), 1]}),
    ],
)
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(RepairError) as caught:
        ChoreoParams(parents=("a",), repair=rule)
    assert caught.value.parameter.startswith("repair")


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("first:32", {"by": "first", "count": 32}),
        ("none", {"by": "none"}),
        ("all", {"by": "all"}),
        ([[(0, 4)], []], {"by": "runs", "runs": [[[0, 4]], []]}),
        ({"clipped": [[(0, 4)]]}, {"by": "clipped", "runs": [[[0, 4]]]}),
        ({"layers": [8, 20]}, {"by": "layers", "layers": [[8, 20]]}),
        ({"layers": ()}, {"by": "none"}),
        ({"reweight": [1, 2]}, {"by": "reweight", "reweight": [1.0, 2.0]}),
        ({"share": 0.5, "by": "random"}, {"by": "random", "share": 0.5, "seed": 0}),
        ({"share": 0.5, "by": "attention", "seed": 3}, {"by": "attention", "share": 0.5}),
    ],
)
def test_short_forms_and_full_ones(short: Any, full: dict[str, Any]) -> None:
    rule = rule_of(short)
    assert rule == rule_of(full)
    assert json.loads(json.dumps(rule.to_json())) == full


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ({"by": "first", "count": 3, "size": 1}, "repair.size"),
        ({"by": "first"}, "repair.count"),
        ({"by": "nearest"}, "repair"),
        ({"by": "runs", "runs": [[[0, 3]], [[5, "9"]]]}, "repair.runs[1][0][1]"),
    ],
)
def test_the_place_of_a_mistake_is_named(rule: Any, place: str) -> None:
    with pytest.raises(RepairError) as caught:
        rule_of(rule)
    assert caught.value.parameter == place


def test_one_list_of_runs_per_parent() -> None:
    for rule in ([[(0, 1)]], {"clipped": [[(0, 1)]]}):
        with pytest.raises(RepairError, match="2 parents, 1 lists"):
            ChoreoParams(parents=("a", "b"), repair=rule)


def test_an_exact_call_is_not_repaired() -> None:
    with pytest.raises(RepairError, match="mode 'exact'"):
        ChoreoParams(parents=("a",), repair="first:3", exact=True)
    with pytest.raises(RepairError, match="mode 'exact'"):
        session_rule("first:3", "exact")


def test_a_session_has_a_rule_and_no_runs() -> None:
    with pytest.raises(RepairError, match="one call"):
        session_rule([[(0, 1)]], "choreo")
    assert session_rule(None, "exact") is None
