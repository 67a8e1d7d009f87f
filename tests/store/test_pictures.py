# SPDX-License-Identifier: Apache-2.0
"""Memory for pictures: its limits, and that it comes back when nobody has a picture any more."""

from __future__ import annotations

import gc

import pytest

from vllm_choreo.errors import LimitError
from vllm_choreo.store.pictures import HeldPicture, PictureMemory


def _held(memory: PictureMemory, name: str, num_bytes: int, tenant: str = "t") -> HeldPicture:
    return memory.hold(tenant, name, object(), num_bytes)


def test_what_has_no_room_is_refused_until_something_is_given_up() -> None:
    memory = PictureMemory(100, 100, gc.collect)
    first, second = _held(memory, "a", 60), _held(memory, "b", 40)
    assert memory.num_bytes == 100
    with pytest.raises(
        LimitError, match=r"0 are free; free messages.*picture_memory_gib"
    ) as caught:
        _held(memory, "c", 1)
    assert (caught.value.parameter, caught.value.value) == ("multi_modal_data", "1 bytes")
    assert _held(memory, "a", 60) is first, "an equal one takes no room"
    del second
    third = _held(memory, "c", 40)
    assert memory.num_bytes == 100 and third.num_bytes == 40


def test_a_tenant_leaves_room_for_others() -> None:
    memory = PictureMemory(100, 50, gc.collect)
    first = _held(memory, "a", 50)
    with pytest.raises(LimitError, match="0 are free"):
        _held(memory, "b", 1)
    other = _held(memory, "a", 50, "u")
    assert other is not first and memory.num_bytes == 100
    with pytest.raises(LimitError):
        _held(memory, "a", 1, "v")


def test_what_only_a_cycle_holds_makes_room() -> None:
    """As a freed message and its encoding are one, which end at some later time."""
    memory = PictureMemory(100, 100, gc.collect)
    cycle: list[object] = [_held(memory, "a", 100)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert memory.num_bytes == 100
        assert _held(memory, "b", 100).num_bytes == 100
    finally:
        gc.enable()
