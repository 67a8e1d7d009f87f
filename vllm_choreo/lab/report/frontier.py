# SPDX-License-Identifier: Apache-2.0
"""Picture of quality over cost: points with intervals, for `macros.html` to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_choreo.lab.report.markup import whole

WIDTH, HEIGHT, _EDGE = 320, 150, 10  # in the picture's own units; an edge around the points


class Point(NamedTuple):
    """A way of running, as a point.

    Attributes:
        name: name for a reader.
        x: cost, in tokens or seconds.
        y: quality, in any unit; `low` and `high` are its interval, None if there is none.
        number: number from 0 on, which sets its colour; the picture names it by one more.
    """

    name: str
    x: float
    y: float
    low: float | None
    high: float | None
    number: int


class Frontier(NamedTuple):
    """The picture of some points.

    Attributes:
        caption: names of the axes of quality and cost.
        scale: values at the top and to the right.
        marks: points in the picture's units, from the left and from the top; without any there is
            no picture.
    """

    caption: str
    scale: str
    marks: list[Point]


def frontier(
    points: Sequence[Point],
    of: str,
    by: str,
    show: Callable[[float], str],
    show_cost: Callable[[float], str] = whole,
) -> Frontier:
    """Lay points out over their cost, from zero on.

    Args:
        points: points in the order in which they are named.
        of, by: names of the axes of quality and cost.
        show, show_cost: write a value of `of`, and of `by`, for a reader.
    """
    right = max((point.x for point in points), default=0) or 1
    top = max((p.y if p.high is None else p.high for p in points), default=0) or 1

    def height(value: float) -> float:
        return HEIGHT - _EDGE - (HEIGHT - 2 * _EDGE) * max(0.0, value) / top

    marks = [
        point._replace(
            x=_EDGE + (WIDTH - 2 * _EDGE) * point.x / right,
            y=height(point.y),
            low=None if point.low is None else height(point.low),
            high=None if point.high is None else height(point.high),
        )
        for point in points
    ]
    scale = f"{show(top)} at the top, {show_cost(right)} to the right"
    return Frontier(f"{of}, by {by}", scale, marks)
