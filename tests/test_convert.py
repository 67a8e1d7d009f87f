# SPDX-License-Identifier: Apache-2.0
"""Conversion of plain data: what fits is typed, and what does not is told with its place."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest
from msgspec import Meta, Struct

from vllm_choreo.convert import convert
from vllm_choreo.errors import ChoreoError, RepairError


class Leaf(Struct, frozen=True, tag="leaf", forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1, description="a size is from 1 on")]
    names: list[str] = []
    shares: dict[str, float | None] = {}


class Branch(Struct, frozen=True, tag="branch", forbid_unknown_fields=True):
    advice: ClassVar[str] = "a branch has parts"
    parts: list[Leaf]

    def __post_init__(self) -> None:
        if len(self.parts) > 2:
            raise RepairError("too many", parameter="parts", value=len(self.parts))


LEAF = {"type": "leaf", "size": 2}


def test_data_are_typed() -> None:
    made = convert({"type": "branch", "parts": [LEAF]}, Leaf | Branch, "given")
    assert made == Branch([Leaf(2)]) and convert(made, Leaf | Branch, "given") is made


@pytest.mark.parametrize(
    ("given", "place", "said", "value"),
    [
        ({**LEAF, "size": 0}, "x.size", "a size is from 1 on", 0),
        ({**LEAF, "size": 2.0}, "x.size", "a size is from 1 on", 2.0),
        ({**LEAF, "names": "a"}, "x.names", "must be a list of which each is a text", "a"),
        ({**LEAF, "names": ["a", None]}, "x.names[1]", "must be a text", None),
        ({**LEAF, "shares": {"b": True}}, "x.shares.b", "must be a number or null", True),
        ({**LEAF, "other": 7}, "x.other", "unknown key; the keys are size, names, shares", 7),
        ({"type": "branch", "parts": [LEAF], "z": 1}, "x.z", "a branch has parts", 1),
        ({"type": "branch", "parts": [LEAF, {}]}, "x.parts[1].size", "a size is from 1 on", None),
        ({"type": "branch"}, "x.parts", "a branch has parts", None),
        ({"type": "branch", "parts": [LEAF] * 3}, "parts", "too many", 3),
        ({"type": "root"}, "x", "must be an object", {"type": "root"}),
        (None, "x", "must be an object", None),
    ],
)
def test_errors_name_place_and_value(given: Any, place: str, said: str, value: Any) -> None:
    with pytest.raises(ChoreoError) as caught:
        convert(given, Leaf | Branch, "x")
    assert (caught.value.parameter, caught.value.message) == (place, said)
    assert caught.value.value == value


@pytest.mark.parametrize("given", [float("nan"), 10**400, "0.5", True])
def test_what_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(RepairError):
        convert(given, Annotated[float, Meta(ge=0)], "x", RepairError)
