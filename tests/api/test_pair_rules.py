# SPDX-License-Identifier: Apache-2.0
"""Profiles of several pairs: which of them a call reads by, and which are refused."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo.api.pair_rules import PairRules, PairsChooser
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import Cell, PairProfile
from vllm_choreo.repair.pair_rule import PairRule
from vllm_choreo.repair.rules import ByLayers, NoTokens
from vllm_choreo.trained_adapter import ModelIdentity

NUM_LAYERS = 8


def model(weights: str) -> ModelIdentity:
    return ModelIdentity(f"model {weights}", weights, "tokenizer")


def profile(writer: str, reader: str, layers: Any, loss: float = 0.1) -> PairProfile:
    """Profile of two whole models that has chosen these layers."""
    cells = (Cell((), 1.0, 0.1, 9.0, 0.1), Cell(layers, loss, 0.01, 9.0, 0.2))
    return PairProfile(
        model(reader), writer, None, NUM_LAYERS, 9.0, cells[not layers :], "", layers
    )


# By the names of writer and reader.
LAYERS: dict[str, Any] = {
    "ab": ((2, 4),),
    "cb": ((3, 6),),
    "db": ((5, 7),),
    "ba": ((1, 3),),
    "eb": ((0, 2), (6, 8)),
}
RULES = PairRules(PairRule(profile(*pair, layers)) for pair, layers in LAYERS.items())


@pytest.mark.parametrize(
    ("reader", "writers", "layers"),
    [
        ("b", "a", ((2, 4),)),
        ("b", "ab", ((2, 4),)),
        ("a", "b", ((1, 3),)),
        ("b", "ac", ((2, 6),)),
        ("b", "ad", ((2, 4), (5, 7))),
        ("b", "acd", ((2, 7),)),
        ("b", "ae", ((0, 4), (6, 8))),
        ("b", "ax", ((2, 4),)),
    ],
)
def test_a_call_encodes_anew_what_the_profiles_of_its_writers_say(
    reader: str, writers: str, layers: Any
) -> None:
    for order in permutations(writers):
        choice = PairsChooser(RULES).choose(reader, order, 5, 0)
        assert choice is not None and choice.cell.rule == ByLayers(layers)
        # Whatever is read together, messages keep what its layers are given.
        assert {first for first, _ in layers if first} <= set(RULES.keep_hidden)


@pytest.mark.parametrize(("reader", "writers"), [("b", "b"), ("b", "x"), ("c", "ab"), ("b", "")])
def test_what_no_profile_is_of_is_read_as_it_is_stored(reader: str, writers: str) -> None:
    chooser = PairsChooser(RULES)
    assert chooser.choose(reader, writers, 5, 0) is None
    assert not any(chooser.counts.values())


def test_a_profile_that_encodes_nothing_anew_says_so() -> None:
    chooser = PairsChooser(PairRules([PairRule(profile("a", "b", ()))]))
    choice = chooser.choose("b", "a", 5, 0)
    assert choice is not None and choice.cell.rule == NoTokens()
    assert chooser.counts == {"none": {"profile": 1}}


def test_adapters_and_their_base_are_told_apart() -> None:
    """A profile of adapters names their base by no weights."""
    cells = (Cell(((1, 2),), 0.1, 0.1, 9.0, 0.1),)
    given = {"cells": cells, "chosen": ((1, 2),), "num_layers": NUM_LAYERS, "num_read": 9.0}
    rules = PairRules(
        PairRule(PairProfile(model("base"), writer, reader, **given))
        for writer, reader in ((None, "one"), ("two", None))
    )
    chooser = PairsChooser(rules)
    read = [("one", "base"), ("base", "two"), ("base", "one"), ("two", "one")]
    assert [bool(chooser.choose(one, [other], 5, 0)) for one, other in read] == [1, 1, 0, 0]
    assert rules.is_read_by(model("base")) and not rules.is_written_by(model("base"))


def test_which_models_have_a_part() -> None:
    read = [RULES.is_read_by(model(name)) for name in "abcx"]
    written = [RULES.is_written_by(model(name)) for name in "abcx"]
    assert (read, written) == ([True, True, False, False], [True, True, True, False])
    RULES.check_model(model("c"))
    with pytest.raises(RepairError, match="none of the profiles"):
        RULES.check_model(model("x"))


def test_profiles_are_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RepairError, match="holds no profile"):
        PairRules.in_folder(tmp_path)
    for pair, layers in LAYERS.items():
        profile(*pair, layers).save(tmp_path / f"{pair}.json")
    (tmp_path / "notes.txt").write_text("no profile")
    rules = PairRules.in_folder(tmp_path)
    assert rules.by_pair.keys() == RULES.by_pair.keys()
    assert rules.keep_hidden == (1, 2, 3, 5, 6)
    profile("a", "b", ((1, 2),)).save(tmp_path / "again.json")
    with pytest.raises(RepairError, match="two profiles"):
        PairRules.in_folder(tmp_path)
    (tmp_path / "again.json").write_text('{"by": "first", "count": 3}')
    with pytest.raises(RepairError):
        PairRules.in_folder(tmp_path)


def test_weights_have_to_be_known() -> None:
    with pytest.raises(RepairError, match="not known"):
        PairRules([PairRule(profile("a", "", ((1, 2),)))])
