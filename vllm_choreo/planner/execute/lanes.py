# SPDX-License-Identifier: Apache-2.0
"""HTML page of a run: a bar for each call, in as many lanes as a worker had calls at a time.

The page loads nothing from elsewhere; texts are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from vllm_choreo.planner.execute.run_stats import Lane, RunStats
from vllm_choreo.planner.plan import Plan

_WIDTH, _HEIGHT, _LEFT = 1000.0, 16.0, 90.0  # of the time axis, of a lane, and before the axis
_MAX_CHARS = 300  # of an answer that is shown when its bar is pointed at
_STYLE = """
body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
text { font-size: 11px; fill: #444 } rect.call { stroke: #fff; stroke-width: .5 }
rect.again { stroke: #c00; stroke-width: 2 } td, th { text-align: left; padding: 2px 12px 2px 0 }
"""


def lanes_page(plan: Plan, stats: RunStats, title: str = "Run of a plan") -> str:
    """Draw the page, HTML.

    Args:
        plan: plan that was run.
        stats: measurements of its run.
        title: heading of the page.
    """
    names = [node.name for node in plan.graph.nodes]
    rows, y = [], 20.0
    for worker in range(len(plan.table.orders)):
        mine = [lane for lane in stats.lanes if lane.worker == worker]
        rows.append(f'<text x="0" y="{y + 11:.0f}">worker {worker}</text>')
        for lanes in _stacked(mine):
            for lane in lanes:
                rows.append(_bar(plan, names, lane, y, stats.seconds))
            y += _HEIGHT
        y += _HEIGHT / 2 + (_HEIGHT if not mine else 0)
    svg = (
        f'<svg width="{_WIDTH + _LEFT + 10:.0f}" height="{y + 20:.0f}" role="img" '
        f'aria-label="calls of each worker over time">{_axis(stats.seconds, y)}'
        + "".join(rows)
        + "</svg>"
    )
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{svg}{_sums(plan, stats)}</html>\n"
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


def _bar(plan: Plan, names: Sequence[str], lane: Lane, y: float, seconds: float) -> str:
    task = plan.tasks[lane.task]
    scale = _WIDTH / max(seconds, 1e-9)
    x, width = _LEFT + lane.begin * scale, max((lane.end - lane.begin) * scale, 1.0)
    answer = lane.answer
    shown = (
        f"{names[task.node]}, query {task.query}"
        f"{f' and {task.num_queries - 1} more' if task.num_queries > 1 else ''}: "
        f"{lane.begin:.2f} to {lane.end:.2f} s, {answer.num_prompt} tokens read "
        f"({answer.reused} reused), {answer.num_out} generated"
        f"{f', made {lane.tries} times' if lane.tries > 1 else ''}\n{answer.text[:_MAX_CHARS]}"
    )
    kind = "call again" if lane.tries > 1 else "call"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{_HEIGHT - 2:.0f}" fill="hsl({task.node * 47 % 360} 55% 62%)">'
        f"<title>{html.escape(shown)}</title></rect>"
    )


def _axis(seconds: float, height: float) -> str:
    ticks = []
    for i in range(6):
        x = _LEFT + _WIDTH * i / 5
        ticks.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="16" y2="{height:.0f}" stroke="#ddd"/>')
        ticks.append(f'<text x="{x - 10:.0f}" y="11">{seconds * i / 5:.2f} s</text>')
    return "".join(ticks)


def _sums(plan: Plan, stats: RunStats) -> str:
    rows = []
    for worker in range(len(plan.table.orders)):
        mine = [lane for lane in stats.lanes if lane.worker == worker]
        read = sum(lane.answer.num_prompt for lane in mine)
        reused = sum(lane.answer.reused for lane in mine)
        cells = [f"worker {worker}", len(mine), read, reused]
        cells += [sum(lane.answer.num_out for lane in mine), sum(lane.tries - 1 for lane in mine)]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = ("", "calls", "tokens read", "of them reused", "generated", "made again")
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{names}</tr>{body}</table>"
