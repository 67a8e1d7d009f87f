# SPDX-License-Identifier: Apache-2.0
"""HTML page of a run: a bar for each call, in as many lanes as a worker had calls at a time.

`lanes.html` is its template. The page loads nothing from elsewhere; texts are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from vllm_choreo.planner.execute.run_stats import Lane, RunStats
from vllm_choreo.planner.plan import OpTask, Plan

_WIDTH, _HEIGHT, _LEFT = 1000, 16, 90  # of the time axis, of a lane, and before the axis


@dataclass(frozen=True)
class _Bar:
    """A call on the page, `x` and `y` from the picture's upper left corner."""

    lane: Lane
    task: OpTask
    name: str
    x: float
    y: int
    width: float


@dataclass(frozen=True)
class _Row:
    """A worker on the page, and its calls."""

    y: int
    bars: Sequence[_Bar]


def lanes_page(plan: Plan, stats: RunStats, title: str = "Run of a plan") -> str:
    """Draw the page, HTML.

    Args:
        plan: plan that was run.
        stats: measurements of its run.
        title: heading of the page.
    """
    from jinja2 import Environment, StrictUndefined

    rows, y = [], 20
    for worker in range(len(plan.table.orders)):
        stacked = _stacked([lane for lane in stats.lanes if lane.worker == worker])
        bars = [
            _bar(plan, lane, y + _HEIGHT * place, stats.seconds)
            for place, lanes in enumerate(stacked)
            for lane in lanes
        ]
        rows.append(_Row(y, bars))
        y += _HEIGHT * max(len(stacked), 1) + _HEIGHT // 2
    text = (files("vllm_choreo.planner.execute") / "lanes.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return environment.from_string(text).render(
        title=title,
        workers=rows,
        seconds=stats.seconds,
        height=y,
        width=_WIDTH,
        left=_LEFT,
        bar_height=_HEIGHT - 2,
    )


def _stacked(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Put calls into lanes; those that do not overlap share one."""
    stacked: list[list[Lane]] = []
    for lane in sorted(lanes, key=lambda lane: lane.begin):
        free = next((row for row in stacked if row[-1].end <= lane.begin), None)
        if free is None:
            stacked.append([lane])
        else:
            free.append(lane)
    return stacked


def _bar(plan: Plan, lane: Lane, y: int, seconds: float) -> _Bar:
    scale = _WIDTH / max(seconds, 1e-9)
    x, width = _LEFT + lane.begin * scale, max((lane.end - lane.begin) * scale, 1.0)
    return _Bar(lane, plan.tasks[lane.task], plan.node(lane.task).name, x, y, width)
