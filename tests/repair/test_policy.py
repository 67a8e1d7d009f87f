# SPDX-License-Identifier: Apache-2.0
"""Policies of repair, and how they are found: against their definitions, and made-up gains."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.calibration import (
    Key,
    ReadParent,
    Trial,
    drawn,
    gains_of,
    keys_of,
    masks_of,
    select_within_budget,
)
from vllm_choreo.repair.policy import Policy, block_runs
from vllm_choreo.repair.rules import Seen
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.trained_adapter import ModelIdentity

MODEL = ModelIdentity("llama", "aa", "bb")
MASKS = {"vote": {"candidate": (0, 2), "ballot": ()}, "answer": {"candidate": (3,)}}
POLICY = Policy("tree_of_thoughts", MODEL, 16, 4, MASKS, 0.1, {"kl": 0.25})


def test_a_policy_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    POLICY.save(path)
    for form in (path, str(path), json.loads(path.read_text()), POLICY, POLICY.to_json()):
        assert session_rule(form, "choreo") == POLICY


def test_what_a_policy_repairs() -> None:
    """Whole blocks of 16; the last one, number 3, goes on to the end."""
    seen = [Seen(0, 40), Seen(5, 90)]
    vote = POLICY.rule("vote", ["candidate", "ballot"]).runs(seen, 32)
    assert vote == (((0, 16), (32, 40)), ())
    answer = POLICY.rule("answer", ["candidate", "candidate"]).runs(seen, 32)
    assert answer == ((), ((48, 85),))


@given(blocks=st.sets(st.integers(0, 5)), length=st.integers(1, 200), block=st.integers(1, 40))
def test_the_tokens_of_blocks(blocks: set[int], length: int, block: int) -> None:
    tokens = {t for t in range(length) if min(t // block, 5) in blocks}
    runs = block_runs(sorted(blocks), block, 6)
    assert {t for t in range(length) if any(a <= t < b for a, b in runs)} == tokens
    parents = [ReadParent("x", length, False), ReadParent("y", length, True)]
    costs = keys_of("reader", parents, block, 6)
    assert sum(costs[key] for key in costs if key.block in blocks) == len(tokens)
    assert {key.parent for key in costs} == {"x"}, "what is right needs no repair"


@pytest.mark.parametrize(
    ("role", "parents", "said"),
    [
        ("judge", ["candidate"], "role of a call is one of vote, answer"),
        (None, ["candidate"], "say role="),
        ("vote", ["turn"], "role of a parent of a vote is one of candidate, ballot"),
        ("answer", [None], "calibrated on tree_of_thoughts"),
    ],
)
def test_another_workflow_is_refused(role: Any, parents: list[Any], said: str) -> None:
    with pytest.raises(RepairError, match=said):
        POLICY.rule(role, parents)


def test_another_model_is_refused() -> None:
    POLICY.check_model(ModelIdentity("elsewhere", "aa", ""))
    with pytest.raises(RepairError, match="calibrated with llama"):
        POLICY.check_model(ModelIdentity("llama", "ac", "bb"))


@pytest.mark.parametrize(
    "change",
    [
        *({"format": 2}, {"model": {}}, {"model": None}, {"block": 0}, {"num_blocks": "4"}),
        *({"budget": 1.5}, {"budget": None}, {"budget": True}, {"masks": []}),
        *({"masks": {"vote": [1]}}, {"masks": {"vote": {"x": [4]}}}, {"masks": {"vote": {"x": 3}}}),
    ],
)
def test_what_is_no_policy_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({**POLICY.to_json(), **change}))
    with pytest.raises(RepairError):
        session_rule(str(path), "choreo")


def test_files_that_hold_no_policy(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name in ("nowhere.json", "text.json", "list.json"):
        with pytest.raises(RepairError):
            session_rule(str(tmp_path / name), "choreo")
    with pytest.raises(RepairError, match="mode 'exact'"):
        session_rule(POLICY, "exact")


# -- how they are found --------------------------------------------------------------------------


def test_gains_that_add_up_are_found() -> None:
    """With noise as large as a gain, from measurements in which half of the blocks are repaired."""
    rng = random.Random(3)
    true = {Key(role, "x", block): (block % 3) * 0.5 for role in "ab" for block in range(8)}
    trials = []
    for _ in range(400):
        for role in "ab":
            repaired = drawn([key for key in true if key.role == role], rng)
            trials.append(Trial(repaired, sum(map(true.get, repaired)) + rng.gauss(0, 0.5)))
    found = gains_of(trials)
    assert found == pytest.approx(true, abs=0.15)
    assert gains_of([]) == {}


@given(data=st.data(), budget=st.integers(0, 300))
def test_what_is_bought_fits_into_the_budget(data: st.DataObject, budget: int) -> None:
    keys = [Key("a", "x", block) for block in range(6)]
    gains = {key: data.draw(st.floats(-1, 1)) for key in keys}
    tokens = {key: data.draw(st.integers(1, 90)) for key in keys}
    chosen = select_within_budget(gains, tokens, Counter(keys), budget)
    spent = sum(tokens[key] for key in chosen)
    assert spent <= budget and all(gains[key] > 0 for key in chosen)
    for key in set(keys) - chosen:
        assert gains[key] <= 0 or tokens[key] > budget - spent


def test_the_best_for_a_token_comes_first() -> None:
    keys = [Key("a", "x", block) for block in range(3)]
    gains = dict(zip(keys, (1.0, 3.0, 4.0), strict=True))
    tokens = dict(zip(keys, (10, 20, 40), strict=True))
    assert select_within_budget(gains, tokens, Counter(keys), 20) == {keys[1]}
    assert select_within_budget(gains, tokens, Counter(keys), 69) == {keys[0], keys[1]}
    masks = masks_of(keys[1:], {"a": {"x", "y"}, "b": {"x"}})
    assert masks == {"a": {"x": (1, 2), "y": ()}, "b": {"x": ()}}
