# SPDX-License-Identifier: Apache-2.0
"""Room that calls of a step take one after the other."""

from __future__ import annotations

from vllm_choreo.engine.scheduler.room import Room


def test_what_is_taken_is_not_left_for_the_next() -> None:
    room = Room(3, 1)
    assert room.has(3, 1) and not room.has(4, 0) and not room.has(0, 2)
    room.take(2, 1)
    assert room.has(1, 0) and not room.has(2, 0) and not room.has(0, 1)


def test_who_may_take_from_others_leaves_them_less_than_nothing() -> None:
    room = Room(1, 1)
    room.take(5, 2)
    assert not room.has(0, 0)
