# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of a calibration: the quality and the cost of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_choreo.lab.report.frontier import Point, frontier
from vllm_choreo.lab.report.markup import filled, milliseconds, nats, note, percent, section, table

_HEAD = (
    *("repair", "KL predicted", "KL to text, nats per token", "same likeliest token"),
    *("tokens encoded", "of reused tokens", "TTFT"),
)
_NOTE = (
    "On runs that were kept back, their tokens forced; in brackets the bootstrap's interval of "
    "95 %. Predicted: from the other runs, on which blocks were repaired at random. Tokens "
    "encoded: per run, before any are generated; of reused tokens: those encoded for repair."
)


def calibration_html(calibration: Mapping[str, Any], advice: str) -> str:
    """Draw the page.

    Args:
        calibration: content of calibration.json.
        advice: a sentence that says what to do.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    candidates = calibration["rungs"]
    pictures = [
        _frontier(candidates, "kl", "KL to the text, nats per token", nats),
        _frontier(candidates, "agreement", "same likeliest token", percent),
        _frontier(candidates, "kl", "KL to the text, nats per token", nats, "ttft"),
    ]
    error = calibration["prediction_error"]
    notes = [_NOTE] + (
        []
        if error is None
        else [f"Predictions are off by {percent(error)} of the KL without repair."]
    )
    runs = ", ".join(f"{count} {name}" for name, count in calibration["runs"].items())
    body = section(
        f"Target {calibration['target']} <small>runs: {runs}</small>",
        note(advice),
        f'<div class="charts">{"".join(pictures)}</div>',
        table(_HEAD, [_cells(candidate) for candidate in candidates]),
        *map(note, notes),
    )
    return filled("Calibration of repair", calibration["facts"], body)


def _frontier(
    candidates: Any, name: str, of: str, show: Callable[[float], str], by: str = "encoded"
) -> str:
    points = [
        Point(
            candidate["name"],
            candidate[by],
            candidate[name],
            candidate.get(f"{name}_low"),
            candidate.get(f"{name}_high"),
            i,
        )
        for i, candidate in enumerate(candidates)
    ]
    if by == "ttft":
        return frontier(points, of, "time to first token", show, milliseconds)
    return frontier(points, of, "tokens encoded per run", show)


def _cells(candidate: Mapping[str, Any]) -> list[str]:
    return [
        candidate["name"],
        nats(candidate["predicted"]),
        f"{nats(candidate['kl'])} ({nats(candidate['kl_low'])} to {nats(candidate['kl_high'])})",
        percent(candidate["agreement"]),
        f"{candidate['encoded']:,.0f}",
        percent(candidate["share"]),
        milliseconds(candidate["ttft"]),
    ]
