# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of a calibration: the quality and the cost of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_choreo.lab.report.frontier import Frontier, Point, frontier
from vllm_choreo.lab.report.markup import filled, interval, milliseconds, nats, percent, whole

_HEAD = (
    *("repair", "KL predicted", "KL to text, nats per token", "same likeliest token"),
    *("tokens encoded", "of reused tokens", "TTFT"),
)

Candidate = Mapping[str, Any]


def calibration_html(calibration: Mapping[str, Any], advice: str) -> str:
    """Draw the page.

    Args:
        calibration: content of calibration.json.
        advice: a sentence that says what to do.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    candidates = calibration["rungs"]
    kl = "KL to the text, nats per token"
    pictures = [
        _frontier(candidates, "kl", kl, nats),
        _frontier(candidates, "agreement", "same likeliest token", percent),
        _frontier(candidates, "kl", kl, nats, "ttft"),
    ]
    drawn = {"pictures": pictures, "head": _HEAD, "rows": calibration_rows(candidates)}
    return filled("calibration.html", {**calibration, **drawn, "advice": advice})


def _frontier(
    candidates: Sequence[Candidate],
    name: str,
    of: str,
    show: Callable[[float], str],
    by: str = "encoded",
) -> Frontier:
    points = [
        Point(one["name"], one[by], one[name], one.get(f"{name}_low"), one.get(f"{name}_high"), i)
        for i, one in enumerate(candidates)
    ]
    if by == "ttft":
        return frontier(points, of, "time to first token", show, milliseconds)
    return frontier(points, of, "tokens encoded per run", show)


def calibration_rows(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Write a line of cells for each candidate, for the page and for a terminal."""
    return [
        [
            *(one["name"], nats(one["predicted"]), interval(one, "kl"), percent(one["agreement"])),
            *(whole(one["encoded"]), percent(one["share"]), milliseconds(one["ttft"])),
        ]
        for one in candidates
    ]
