# SPDX-License-Identifier: Apache-2.0
"""Picture of quality over cost: points with intervals, as SVG in a page."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

_COLOURS = ("#2f66b3", "#cf7a17", "#1f8a78", "#8a4bb0", "#b3372f", "#788090")
_WIDTH, _HEIGHT, _EDGE = 320, 150, 10  # in the picture's own units; an edge around the points


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


def colour(number: int) -> str:
    """Colour of an arm, by its number."""
    return _COLOURS[number % len(_COLOURS)]


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def frontier(
    points: Sequence[Point],
    of: str,
    by: str,
    show: Callable[[float], str],
    show_cost: Callable[[float], str] = _whole,
) -> str:
    """Draw points over their cost, from zero on, in HTML; "" if there are none.

    Args:
        points: points in the order in which they are named.
        of, by: names of the axes of quality and cost.
        show, show_cost: write a value of `of`, and of `by`, for a reader.
    """
    if not points:
        return ""
    right = max(point.x for point in points) or 1
    top = max(point.y if point.high is None else point.high for point in points) or 1
    marks = "".join(_mark(point, right, top) for point in points)
    names = ", ".join(
        f'<b style="color:{colour(p.number)}">{p.number + 1}</b> {html.escape(p.name)}'
        for p in points
    )
    axis = html.escape(f"{show(top)} at the top, {show_cost(right)} to the right")
    return (
        f"<figure><figcaption>{html.escape(f'{of}, by {by}')}</figcaption>"
        f'<svg class="frontier" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{axis}">'
        f'{marks}</svg><p class="note">{names}</p><p class="note">{axis}</p></figure>'
    )


def _mark(point: Point, right: float, top: float) -> str:
    """Draw a disc with the point's number, and a line from end to end of its interval."""
    x = _EDGE + (_WIDTH - 2 * _EDGE) * point.x / right
    line = ""
    if point.low is not None and point.high is not None:
        ends = f'y1="{_height(point.low, top):.1f}" y2="{_height(point.high, top):.1f}"'
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour(point.number)}"/>'
    y = _height(point.y, top)
    return (
        f"<g><title>{html.escape(point.name)}</title>{line}"
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour(point.number)}"/>'
        f'<text x="{x:.1f}" y="{y:.1f}">{point.number + 1}</text></g>'
    )


def _height(value: float, top: float) -> float:
    return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * max(0.0, value) / top
