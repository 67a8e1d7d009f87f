# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of a profiled pair: which layers matter, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_choreo.lab.report.frontier import Point, frontier
from vllm_choreo.lab.report.markup import (
    filled,
    milliseconds,
    nats,
    note,
    percent,
    section,
    table,
    text,
)

_SIDE = 300  # of the heat map, in its own units
_HEAD = (
    *("layers anew", "right", "difference, points", "KL to own encoding, nats per token"),
    *("KL gap closed", "tokens encoded", "TTFT"),
)
_ABOUT_MAP = (
    "Each square is a block of layers that the reader encodes anew: it begins with the layer of "
    "its row (the first one at the top) and ends with that of its column. The darker, the less is "
    "lost of the distance between reading what is stored and the reader's own encoding. Dots were "
    "measured, all else is as the nearest dot."
)


def pair_html(data: Mapping[str, Any], advice: str) -> str:
    """Draw the page.

    Args:
        data: content of profile.json.
        advice: a sentence that says what to do.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    profile = data["profile"]
    pictures = heat_map(profile["cells"], profile["num_layers"]) + _frontier(profile["cells"])
    body = [
        section(
            f"Target {text(profile['target'])}",
            note(advice),
            f'<div class="charts">{pictures}</div>',
            note(_ABOUT_MAP),
        )
    ]
    if data["layer_map"] is not None:
        body.append(_layer_map(data["layer_map"]))
    body += [
        section(text(one["name"]), table(_HEAD, map(_cells, one["rows"]))) for one in data["sets"]
    ]
    return filled("Profile of a pair", data["facts"], "\n".join(body))


def heat_map(cells: Sequence[Mapping[str, Any]], num_layers: int) -> str:
    """Draw the loss that each block of layers leaves, that of the nearest one measured, in HTML."""
    blocks = {tuple(cell["layers"][0]): cell for cell in cells if len(cell["layers"]) == 1}
    squares = []
    for first in range(num_layers):
        for stop in range(first + 1, num_layers + 1):
            nearest = min(blocks, key=lambda b: abs(b[0] - first) + abs(b[1] - stop))
            is_measured = nearest == (first, stop)
            squares.append(_square(first, stop, blocks[nearest], is_measured, _SIDE / num_layers))
    caption = f"Loss by block of layers, 0 to {num_layers}"
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" role="img" aria-label="{caption}">'
        f"{''.join(squares)}</svg></figure>"
    )


def _square(first: int, stop: int, cell: Mapping[str, Any], is_measured: bool, side: float) -> str:
    dark = 1.0 - min(1.0, max(0.0, cell["quality_loss"]))
    x, y = (stop - 1) * side, first * side
    square = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}" fill="#1f8a78" '
        f'fill-opacity="{dark:.2f}"/>'
    )
    if not is_measured:
        return square
    about = (
        f"layers {first} to {stop}: loss {percent(cell['quality_loss'])}, "
        f"{nats(cell['kl'])} nats per token, {milliseconds(cell['ttft'])}"
    )
    dot = f'<circle cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="1.5" fill="#cf7a17"/>'
    return f"<g><title>{about}</title>{square}{dot}</g>"


def _frontier(cells: Sequence[Mapping[str, Any]]) -> str:
    """Picture of the cells that no cell of fewer layers beats, by time to the first token."""
    best: list[Mapping[str, Any]] = []
    for cell in sorted(cells, key=lambda cell: (_num_run(cell), cell["quality_loss"])):
        if not best or cell["quality_loss"] < best[-1]["quality_loss"]:
            best.append(cell)
    points = [
        Point(_name(cell), cell["ttft"], cell["kl"], cell["kl_low"], cell["kl_high"], number)
        for number, cell in enumerate(best)
    ]
    of, by = "KL to the reader's own encoding, nats per token", "time to first token"
    return frontier(points, of, by, nats, milliseconds)


def _num_run(cell: Mapping[str, Any]) -> int:
    return sum(stop - first for first, stop in cell["layers"])


def _name(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{first}–{stop}" for first, stop in cell["layers"]) or "none"


def _layer_map(layer_map: Mapping[str, Any]) -> str:
    """Gap that each layer closes by itself, and the best single layers beside the best block."""
    gains = layer_map["gains"]
    most = max([abs(gain) for gain in gains], default=0) or 1
    bars = "".join(
        f'<div class="arm"><span>layer {layer}</span><span class="bartrack">'
        f'<i class="value" style="width:{100 * max(0.0, gain) / most:.1f}%"></i></span>'
        f"<b>{percent(gain)}</b></div>"
        for layer, gain in enumerate(gains)
    )
    rows = [
        (
            str(_num_run(pair["scattered"])),
            *(_name(pair["scattered"]), percent(1 - pair["scattered"]["quality_loss"])),
            *(_name(pair["contiguous"]), percent(1 - pair["contiguous"]["quality_loss"])),
        )
        for pair in layer_map["compared"]
    ]
    head = ("layers", "the best single ones", "KL gap closed", "the best block", "KL gap closed")
    about = "Each layer alone encoded anew, from what the writer's layer was given."
    figure = f"<figure><figcaption>KL gap closed by one layer</figcaption>{bars}</figure>"
    return section("Layer by layer", note(about), figure, table(head, rows))


def _cells(row: Mapping[str, Any]) -> list[str]:
    judged = row["judged"]
    return [
        row["arm"],
        f"{row['right']} of {judged}" if judged else "–",
        percent(row["difference"], sign=True),
        f"{nats(row['kl'])} ({nats(row['kl_low'])} to {nats(row['kl_high'])})",
        percent(row["kl_gap_closed"]),
        f"{row['encoded']:,.0f}",
        milliseconds(row["ttft"]),
    ]
