# SPDX-License-Identifier: Apache-2.0
"""The pictures of scaling."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.pictures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    RED,
    draw_line,
    logarithmic,
    name_ticks,
    panels,
    save_picture,
)
from benchmarks.scaling.rows import (
    NAMES,
    Rows,
    blocks_of,
    points_of,
    reader_counts,
    sides_of,
    step_seconds,
    ttfts,
)

COLOURS = {
    "choreo": BLUE,
    "prefix": PALE,
    "stock": RED,
    "text": RED,
    "grouped": BLUE,
    "own orders": GREEN,
    "ungrouped": ORANGE,
    "no context": INK,
}


def draw_first_token(rows: Rows) -> None:
    by_tokens, by_readers = points_of(rows)
    titles = ("One reader", f"Readers of {by_readers[0][0]:,} tokens")
    figure, (left, right) = panels(titles)
    for axes, points, place in ((left, by_tokens, 0), (right, by_readers, 1)):
        x = [point[place] for point in points]
        for side in sides_of(rows):
            values = [ttfts(rows, side, *point) for point in points]
            draw_line(axes, x, values, NAMES[side], COLOURS[side])
        logarithmic(axes)
        axes.set_ylabel("ms to first token", fontsize=9)
        name_ticks(axes, x)
    left.set_xlabel("shared tokens", fontsize=9)
    right.set_xlabel("readers", fontsize=9)
    left.legend(frameon=False, fontsize=8.5)
    save_picture(figure, "scaling_ttft")


def draw_decode(first: Rows, decode: Rows, speeds: Mapping[str, float]) -> None:
    _, points = points_of(first)
    titles = ("Decoding, readers of 4,000 tokens", f"KV cache, readers of {points[0][0]:,} tokens")
    figure, (left, right) = panels(titles)
    x = reader_counts(decode)
    for side in sides_of(decode):
        values = [[n / s for s in step_seconds(decode, side, n)] for n in x]
        draw_line(left, x, values, NAMES[side], COLOURS[side])
    left.set_ylabel("tokens per second, all readers", fontsize=9)
    for side in sides_of(first):
        megabytes = [[blocks_of(first, side, p) * speeds["block_bytes"] / 1e6] for p in points]
        draw_line(right, [readers for _, readers in points], megabytes, NAMES[side], COLOURS[side])
    right.set_ylabel("MB in use", fontsize=9)
    logarithmic(right)
    for axes in (left, right):
        name_ticks(axes, x)
        axes.set_xlabel("readers", fontsize=9)
        axes.legend(frameon=False, fontsize=8.5)
    left.set_ylim(bottom=0)
    save_picture(figure, "scaling_decode")
