# SPDX-License-Identifier: Apache-2.0
"""Profiles of pairs, what is tried for one, and what a session takes of it."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_choreo.cli.engine import memory_for
from vllm_choreo.errors import RepairError
from vllm_choreo.lab.study.profile_pair.grid import coarse, finer, scattered, singles, steps
from vllm_choreo.repair.pair import Cell, PairProfile, pareto
from vllm_choreo.repair.pair_rule import HYSTERESIS, PairChooser, PairRule
from vllm_choreo.repair.rules import ByLayers, NoTokens
from vllm_choreo.repair.runs import merge_ranges
from vllm_choreo.repair.session_rules import (
    check_sent,
    names_file,
    runs_some_layers,
    session_rule,
)
from vllm_choreo.trained_adapter import ModelIdentity

MODEL = ModelIdentity("llama", "aa", "bb")


def _cell(layers: Any, loss: float, ttft: float) -> Cell:
    return Cell(layers, loss, kl=loss / 10, encoded=100.0, ttft=ttft)


CELLS = (
    _cell((), 1.0, 0.1),
    _cell(((2, 4),), 0.5, 0.2),
    _cell(((0, 2),), 0.6, 0.2),
    _cell(((0, 1), (3, 6)), 0.1, 0.3),
    _cell(((0, 8),), 0.0, 0.6),
)
PROFILE = PairProfile(MODEL, None, "cc", 8, 100.0, CELLS, "loss=0.5", ((2, 4),), {"set": "x"})


def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    PROFILE.save(path)
    rule = PairRule(PROFILE)
    for form in (path, str(path), json.loads(path.read_text()), PROFILE, {"pair": str(path)}):
        assert session_rule(form, "choreo") == rule
    wanted = {"max_quality_loss": 0.6, "ttft": 0.5}
    rule = session_rule({"pair": str(path), **wanted}, "choreo")
    assert rule == PairRule(PROFILE, 0.6, 0.5)
    assert isinstance(rule, PairRule)
    sent = session_rule(json.loads(json.dumps(rule.to_json())), "choreo")
    assert isinstance(sent, PairRule)
    assert sent.allowed == rule.allowed and sent.keep_hidden == rule.keep_hidden == (2, 3)


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 2)), min_size=1, max_size=20))
def test_a_frontier_has_what_nothing_beats(drawn: list[tuple[int, float]]) -> None:
    cells = [_cell(((0, count),) if count else (), loss, 1.0) for count, loss in drawn]
    best = pareto(cells)
    for one, other in pairwise(best):
        assert one.num_layers < other.num_layers and one.quality_loss > other.quality_loss
    for cell in cells:
        assert any(
            b.num_layers <= cell.num_layers and b.quality_loss <= cell.quality_loss for b in best
        )


def test_which_cell_is_taken_without_a_target_of_time() -> None:
    """The chosen one; with a loss that is allowed the cheapest of those that lose no more."""
    for most, layers in ((None, ((2, 4),)), (0.5, ((2, 4),)), (0.6, ((2, 4),)), (2.0, ())):
        chooser = PairChooser(PairRule(PROFILE, most))
        assert {chooser.choose(n, q).cell.layers for n in (1, 10**6) for q in (0, 9)} == {layers}
    assert PairChooser(PairRule(PROFILE, 0.0)).choose(5, 0).cell.rule == ByLayers(((0, 8),))
    assert PairChooser(PairRule(PROFILE, 1.0)).choose(5, 0).cell.rule == NoTokens()
    assert chooser.counts == {"none": {"profile": 4}}


@given(
    target=st.floats(0.01, 3),
    most=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    calls=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), min_size=1, max_size=30),
)
def test_the_choice_by_time_and_load(
    target: float, most: float, calls: list[tuple[int, int]]
) -> None:
    """No cell loses more than is allowed; the target is met where any is fast enough; nothing
    better than the last is taken unless it is amply fast, and nothing worse unless it must."""
    rule = PairRule(PROFILE, most, target)
    chooser, last = PairChooser(rule), rule.allowed[-1]
    for num_read, num_before in calls:
        times = {c: c.ttft * num_read / 100 * (1 + num_before) for c in rule.allowed}
        cell, reason = chooser.choose(num_read, num_before)
        assert cell.quality_loss <= most
        fit = [c for c in rule.allowed if times[c] <= target]
        if not fit:
            assert cell == rule.allowed[0] and reason == "late"
        elif cell.num_layers > last.num_layers:
            assert times[cell] <= HYSTERESIS * target
        elif cell != last:
            assert times[last] > target
        assert (reason == "late") == (times[cell] > target)
        if reason in ("length", "load"):
            better = rule.allowed[rule.allowed.index(cell) + 1]
            is_long = better.ttft * num_read / 100 > HYSTERESIS * target
            assert (reason == "length") == is_long
        last = cell
    assert sum(sum(of.values()) for of in chooser.counts.values()) == len(calls)


def test_a_change_for_the_better_waits() -> None:
    """A load that goes up and down around a border does not make the choice do so."""
    chooser = PairChooser(PairRule(PROFILE, 1.0, 0.61))
    assert chooser.choose(100, 0).cell.layers == ((0, 8),)
    assert chooser.choose(102, 0).cell.layers == ((0, 1), (3, 6)), "0.612 s are too long"
    assert chooser.choose(100, 0).cell.layers == ((0, 1), (3, 6)), "0.600 s are not amply fast"
    found = chooser.choose(80, 0)
    assert found.cell.layers == ((0, 8),) and found.reason == "best"
    assert chooser.choose(80, 1).reason == "load"
    assert chooser.choose(80, 90) == (CELLS[0], "late")


def test_who_reads_by_a_profile() -> None:
    rule = PairRule(PROFILE)
    assert rule.is_read_by("cc") and rule.is_read_by("") and not rule.is_read_by(None)
    with pytest.raises(RepairError, match="neither of the pair"):
        rule.is_read_by("dd")
    with pytest.raises(RepairError, match="profiled with llama"):
        rule.check_model(ModelIdentity("other", "xx", "bb"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_quality_loss": -1}, "from 0 on"),
        ({"ttft": True}, "from 0 on"),
        ({"speed": 3}, "a pair is read by"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RepairError, match=said):
        session_rule({"pair": PROFILE.to_json(), **options}, "choreo")
    with pytest.raises(RepairError, match="mode 'exact'"):
        session_rule(PROFILE, "exact")


def test_what_no_profile_reaches() -> None:
    best = replace(PROFILE, cells=CELLS[:2], chosen=None)
    with pytest.raises(RepairError, match="no choice of layers loses so little"):
        PairRule(best, 0.1)
    with pytest.raises(RepairError, match="no choice of layers reaches"):
        PairRule(best)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"model": {"name": "x"}},
        {"num_layers": 0},
        {"num_layers": 4},  # a cell goes to layer 8
        {"num_read": 0},
        {"cells": []},
        {"cells": [{"layers": [[0, 2]]}]},
        {"cells": [{**PROFILE.to_json()["cells"][0], "kl_low": "x"}]},
        {"cells": [{**PROFILE.to_json()["cells"][0], "layers": [[3, 1]]}]},
        {"reader": 5},
    ],
)
def test_bad_profiles(change: dict[str, Any], tmp_path: Path) -> None:
    data = {**PROFILE.to_json(), **change}
    (tmp_path / "pair.json").write_text(json.dumps(data))
    for form in (data, tmp_path / "pair.json", {"pair": data}):
        with pytest.raises(RepairError):
            session_rule(form, "choreo")


def test_which_rules_need_memory_for_hidden_states() -> None:
    for rule in (PROFILE, {"layers": [1, 2]}, {"share": 0.1, "by": "attention"}, PROFILE.to_json()):
        assert runs_some_layers(rule) and memory_for([None, rule])
    for rule in ("first:3", None, {"layers": []}, {"share": 0.1, "by": "random"}):
        assert not runs_some_layers(rule) and memory_for([rule]) == {}


def test_a_server_opens_no_file_for_a_client() -> None:
    for form in ("a.json", Path("a"), {"pair": "a.json"}, {"pair": {"pair": "a.json"}}):
        assert names_file(form)
        with pytest.raises(RepairError, match="opens no file"):
            check_sent(form)
    for form in ("first:3", None, PROFILE.to_json(), {"pair": PROFILE.to_json()}, [[(0, 3)]]):
        check_sent(form)


# -- what is tried -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 30, 80])
def test_the_grid(num_layers: int) -> None:
    blocks = coarse(num_layers)
    assert len(set(blocks)) == len(blocks) and ((0, num_layers),) in blocks
    edges = {end for block in blocks for end in block[0]}
    assert len(edges) == min(num_layers, 5) + 1
    assert len(blocks) == math.comb(len(edges), 2)
    for step in steps(num_layers):
        for ranges in finer(blocks[:3], step, num_layers):
            assert ranges not in blocks[:3]
            assert all(0 <= a < b <= num_layers for a, b in ranges)
            assert all(b < a for (_, b), (a, _) in pairwise(ranges)), "a layer lies between two"
    assert not steps(num_layers) or steps(num_layers)[-1] == 1
    assert singles(num_layers)[-1] == ((num_layers - 1, num_layers),)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=6))
def test_ranges_that_touch_are_one(drawn: list[tuple[int, int]]) -> None:
    ranges = [(first, first + length) for first, length in drawn]
    found = merge_ranges(ranges)
    held = {layer for a, b in ranges for layer in range(a, b)}
    assert {layer for a, b in found for layer in range(a, b)} == held
    assert all(b < a for (_, b), (a, _) in pairwise(found))


def test_the_best_single_layers() -> None:
    assert scattered([0.1, 0.5, 0.4, 0.0, 0.9], 3) == ((1, 3), (4, 5))
    assert scattered([0.1, 0.5, 0.4], 3) == ((0, 3),)
