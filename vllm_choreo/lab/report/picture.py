# SPDX-License-Identifier: Apache-2.0
"""Drawing of workflows: which call read what, and what had to be encoded (matplotlib, no display).

One row of panels per workflow. Columns are stages, boxes are messages, lines run from a message to
the calls that read it. In each box two strips of equal scale show the call's whole context:

    choreographed   | role | question | answer 1 | … |new|    colours: read from the cache
    baseline        | prefix hit |   encoded again   |new|    grey, red
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _PALE, _HIT, _AGAIN, _NEW = "#1f2430", "#8a93a3", "#c3c9d3", "#d64545", "#1f2430"
_PAGE, _BOX = "#fbfbf9", "#ffffff"
# Of authors that speak, in order of appearance, and of the other messages. None is red.
_SPEAKERS = (
    "#2f6fb3", "#e09a2b", "#2a9d7f", "#8e5cc2", "#4fb0d9", "#9aa832", "#c77fb0", "#5f7f5a",
    "#b5793f",
)  # fmt: skip
_OTHERS = ("#7a869a", "#b9a88a", "#a3aab8")

_COLUMN, _WIDTH = 3.2, 2.15  # distance of columns and width of boxes, in inches
_ROW, _HEIGHT = 0.78, 0.62  # the same downwards
_STRIP, _MARGIN = 0.105, 0.09  # height of a strip, and the room around it


def draw_workflows(
    pairs: Sequence[tuple[Transcript, Transcript]], folder: Path, name: str = "workflows"
) -> list[Path]:
    """Draw workflows, each of which ran choreographed and as baseline.

    Args:
        pairs: (choreographed, baseline) runs of the same program, call for call.
        folder: an existing folder.
        name: name of the files, without suffix.

    Returns:
        The paths of an SVG and a PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_panel_height(choreo) for choreo, _ in pairs]
    columns = max(len(choreo.stages()) for choreo, _ in pairs)
    width = 0.6 + (columns - 1) * _COLUMN + _WIDTH
    legend = 0.62
    figure = Figure(figsize=(width, sum(heights) + legend), facecolor=_PAGE)
    FigureCanvasAgg(figure)
    total = sum(heights) + legend
    top = total
    for (choreo, base), height in zip(pairs, heights, strict=True):
        top -= height
        axes = figure.add_axes((0.0, top / total, 1.0, height / total))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        _draw_panel(axes, choreo, base)
    axes = figure.add_axes((0.0, 0.0, 1.0, legend / total))
    axes.set(xlim=(0, width), ylim=(legend, 0))
    axes.axis("off")
    _draw_legend(axes, width)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        figure.savefig(path, dpi=130, facecolor=_PAGE)
    return paths


def _panel_height(transcript: Transcript) -> float:
    rows = max(len(steps) for steps in _columns(transcript))
    return 0.95 + rows * _ROW


def _columns(transcript: Transcript) -> list[list[Step]]:
    return [
        [step for step in transcript.steps if step.stage == stage] for stage in transcript.stages()
    ]


def _draw_panel(axes: Axes, choreo: Transcript, base: Transcript) -> None:
    places = _places(choreo)
    colours = _author_colours(choreo.steps)
    by_id = {step.message.id: step for step in choreo.steps}
    _draw_titles(axes, choreo, base)
    for step in choreo.steps:
        for parent in dict.fromkeys(span.id for span in step.message.parents):
            if step.message.generated_token_ids:
                _draw_line(axes, places[parent], places[step.message.id], colours, by_id[parent])
    longest = max(_num_context(step.message, by_id) for step in choreo.steps)
    scale = (_WIDTH - 2 * _MARGIN) / longest
    for step, other in zip(choreo.steps, base.steps, strict=True):
        _draw_box(axes, places[step.message.id], step, colours)
        if step.message.generated_token_ids:
            _draw_strips(axes, places[step.message.id], step, other, by_id, colours, scale)


def _places(transcript: Transcript) -> dict[str, tuple[float, float]]:
    """Upper left corner of each message's box, in inches; columns are centred."""
    columns = _columns(transcript)
    rows = max(len(column) for column in columns)
    places = {}
    for x, column in enumerate(columns):
        first = (rows - len(column)) / 2
        for y, step in enumerate(column):
            places[step.message.id] = (0.3 + x * _COLUMN, 0.85 + (first + y) * _ROW)
    return places


def _author_colours(steps: Sequence[Step]) -> dict[str, str]:
    """Colour of each author; those that generate nothing are pale."""
    speakers = dict.fromkeys(step.author for step in steps if step.message.generated_token_ids)
    others = dict.fromkeys(step.author for step in steps if step.author not in speakers)
    return {
        author: palette[i % len(palette)]
        for authors, palette in ((speakers, _SPEAKERS), (others, _OTHERS))
        for i, author in enumerate(authors)
    }


def _draw_titles(axes: Axes, choreo: Transcript, base: Transcript) -> None:
    encoded = [sum(s.message.usage.encoded_tokens for s in t.steps) for t in (choreo, base)]
    axes.text(0.3, 0.30, choreo.title, fontsize=15, weight="bold", color=_INK)
    axes.text(
        0.3 + 0.122 * len(choreo.title) + 0.3,
        0.30,
        f"{encoded[0]:,} tokens encoded choreographed, {encoded[1]:,} as baseline",
        fontsize=10.5,
        color=_PALE,
    )
    for x, stage in enumerate(choreo.stages()):
        axes.text(
            0.3 + x * _COLUMN, 0.68, stage, fontsize=10.5, color=_INK, weight="bold", alpha=0.75
        )


def _draw_line(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colours: dict[str, str],
    parent: Step,
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    x0, y0 = start[0] + _WIDTH, start[1] + _HEIGHT / 2
    x1, y1 = end[0], end[1] + _HEIGHT / 2
    # Leaves and arrives level, and turns between the columns, so that lines bundle there.
    bend = (_COLUMN - _WIDTH) * 0.8
    curve = Curve(
        [(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)],
        [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
    )
    colour = colours[parent.author]
    axes.add_patch(PathPatch(curve, fill=False, color=colour, lw=1.1, alpha=0.5, zorder=1))


def _draw_box(axes: Axes, place: tuple[float, float], step: Step, colours: dict[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    x, y = place
    box = FancyBboxPatch(
        (x, y),
        _WIDTH,
        _HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=_BOX,
        edgecolor=colours[step.author],
        linewidth=1.4,
        zorder=2,
    )
    axes.add_patch(box)
    axes.add_patch(
        Rectangle((x + 0.09, y + 0.08), 0.11, 0.11, color=colours[step.author], zorder=3)
    )
    axes.text(x + 0.26, y + 0.14, step.author, fontsize=9, va="center", color=_INK, zorder=3)
    message = step.message
    if message.generated_token_ids:
        note = f"read {message.usage.reused_tokens}, new {message.num_tokens}"
    else:
        note = f"{message.num_tokens} tokens"
        text = " ".join(message.text.replace("<|im_start|>", "").replace("<|im_end|>", "").split())
        text = text.partition(" ")[2]  # without the name of the chat role
        short = text if len(text) <= 33 else text[:32].rstrip() + "…"
        axes.text(x + 0.09, y + 0.42, short, fontsize=7.6, va="center", color=_PALE, zorder=3)
    axes.text(
        x + _WIDTH - 0.09,
        y + 0.14,
        note,
        fontsize=7.6,
        va="center",
        ha="right",
        color=_PALE,
        zorder=3,
    )


def _draw_strips(
    axes: Axes,
    place: tuple[float, float],
    step: Step,
    other: Step,
    by_id: dict[str, Step],
    colours: dict[str, str],
    scale: float,
) -> None:
    x, y = place[0] + _MARGIN, place[1] + 0.27
    message, twin = step.message, other.message
    reads = [
        (num_read, colours[by_id[parent].author]) for parent, num_read in _reads(message, by_id)
    ]
    _draw_strip(axes, x, y, [*reads, (message.num_tokens, _NEW)], scale)
    again = twin.usage.encoded_tokens - twin.num_tokens
    parts = [(twin.usage.reused_tokens, _HIT), (again, _AGAIN), (twin.num_tokens, _NEW)]
    _draw_strip(axes, x, y + _STRIP + 0.06, parts, scale)


def _draw_strip(
    axes: Axes, x: float, y: float, parts: Sequence[tuple[int, str]], scale: float
) -> None:
    from matplotlib.patches import Rectangle

    for num_tokens, colour in parts:
        width = num_tokens * scale
        axes.add_patch(
            Rectangle((x, y), width, _STRIP, facecolor=colour, edgecolor=_BOX, lw=0.5, zorder=3)
        )
        x += width


def _reads(message: Message, by_id: dict[str, Step]) -> list[tuple[str, int]]:
    """List (parent id, number of its tokens that are read), in the order of the call."""
    reads = []
    for span in message.parents:
        length = by_id[span.id].message.num_tokens
        stop = length if span.stop is None else span.stop
        reads.append((span.id, stop - (span.start or 0)))
    return reads


def _num_context(message: Message, by_id: dict[str, Step]) -> int:
    return message.num_tokens + sum(num_read for _, num_read in _reads(message, by_id))


def _draw_legend(axes: Axes, width: float) -> None:
    from matplotlib.patches import Rectangle

    axes.plot([0.3, width - 0.3], [0.04, 0.04], color=_HIT, lw=0.8)
    entries = [
        ("Upper strip, choreographed:", None),
        ("read from the cache, by author", _SPEAKERS[0]),
        ("new message", _NEW),
        ("Lower strip, baseline:", None),
        ("prefix-cache hit", _HIT),
        ("encoded again", _AGAIN),
    ]
    x = 0.3
    for text, colour in entries:
        if colour is not None:
            axes.add_patch(Rectangle((x, 0.25), 0.2, _STRIP, color=colour))
            x += 0.26
        weight = "bold" if colour is None else "normal"
        label = axes.text(x, 0.305, text, fontsize=9, va="center", color=_INK, weight=weight)
        # One unit of these axes is an inch.
        x += label.get_window_extent().width / axes.figure.dpi + 0.25
