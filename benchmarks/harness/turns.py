# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(sides: Sequence[T], turn: int) -> list[T]:
    """All sides; who is first changes from turn to turn, so that no side gains by its place."""
    return list(sides) if turn % 2 == 0 else list(reversed(sides))
