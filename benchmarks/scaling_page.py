# SPDX-License-Identifier: Apache-2.0
"""The page and the plots of `bench_scaling`, from its CSV files, with the cost models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import machine_line, median, read_csv, table, with_spread
from benchmarks.pictures import (
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

UNGROUPED_BAR, PREFIX_BAR = 2.5, 2.0  # tokens/s of 16 readers, grouped / the other
BAR_READERS = 16
NAMES = {
    "choreo": "choreographed",
    "prefix": "cached prefix",
    "stock": "cached prefix, stock vLLM",
    "text": "text after a role",
    "grouped": "choreographed, read together",
    "own orders": "the same, each in its own order",
    "ungrouped": "choreographed, each by itself",
    "no context": "nothing to read",
}
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
Rows = Sequence[Mapping[str, Any]]


def bars_reached(decode: Rows) -> bool:
    """Whether reading together is as much faster as it should be, in every pass."""
    return all(
        _ratio(decode, number, side) >= (UNGROUPED_BAR if side == "ungrouped" else PREFIX_BAR)
        for number in _passes(decode)
        for side in _rivals(decode)
    )


def section() -> str:
    """This benchmark's part of RESULTS.md; draws the plots."""
    first, decode = read_csv("scaling_first_token"), read_csv("scaling_decode")
    if not first or not decode:
        return ""
    speeds = {key: _number(value) for key, value in read_csv("scaling_machine")[0].items()}
    _draw_first_token(first)
    _draw_decode(first, decode, speeds)
    verdict = "reached" if bars_reached(decode) else "MISSED"
    return "\n\n".join(
        [
            "## Scaling: shared tokens and readers",
            "Readers, each with a role of its own, read the same messages. Choreographed; as text "
            "after the role, where no two readers share a prefix; as a common prefix that vLLM has "
            "cached, with the role after it. Encoding the messages for the first time is counted "
            "for the text alone, which does it for every reader; encoding the roles is counted for "
            "all. Milliseconds to the first token, median over readers: median [quartiles]; ratio "
            "of the medians.",
            _first_token_table(first, speeds),
            _first_token_model(speeds),
            "![Time to first token](results/scaling_ttft.png)",
            "### Decode throughput of many readers",
            "Readers of 4,000 tokens in 8 messages generate at once: tokens per second of all "
            "together, median [quartiles] over steps. Log-probabilities of all that read in the "
            "same order were compared before, and agree within 0.001. Stock vLLM is a process "
            "without the plugin, with vLLM's own block size (long form only). Bars, at "
            f"{BAR_READERS} readers: together at least {UNGROUPED_BAR} times each by itself, and "
            f"{PREFIX_BAR} times a cached prefix: {verdict}.",
            _throughput_table(decode),
            _ratio_table(decode),
            _step_model(decode, speeds),
            _memory_table(first, speeds),
            "![Decode throughput and memory](results/scaling_decode.png)",
            machine_line(first),
        ]
    )


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _passes(rows: Rows) -> list[Any]:
    return list(dict.fromkeys(row["pass"] for row in rows))


def _sides(rows: Rows) -> list[str]:
    """In the order of `NAMES`, whichever ran first."""
    found = {row["side"] for row in rows}
    return [side for side in NAMES if side in found]


# -- time to first token -------------------------------------------------------------------------


def _times(rows: Rows, side: str, tokens: int, readers: int) -> list[float]:
    """Milliseconds to first token, of all passes."""
    return [
        1e3 * float(row["median_s"])
        for row in rows
        if (row["side"], int(row["tokens"]), int(row["readers"])) == (side, tokens, readers)
    ]


def _points(rows: Rows) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(tokens, readers) by tokens with one reader, and by readers with the same tokens."""
    points = dict.fromkeys((int(row["tokens"]), int(row["readers"])) for row in rows)
    several = next(tokens for tokens, readers in points if readers > 1)
    by_tokens = sorted(point for point in points if point[1] == 1)
    return by_tokens, sorted(point for point in points if point[0] == several)


def _first_token_table(rows: Rows, speeds: Mapping[str, float]) -> str:
    by_tokens, by_readers = _points(rows)
    sides = _sides(rows)
    lines = []
    for tokens, readers in dict.fromkeys([*by_tokens, *by_readers]):
        times = {side: _times(rows, side, tokens, readers) for side in sides}
        ours = median(times["choreo"])
        lines.append(
            (
                f"{tokens:,}, {readers}",
                *(with_spread(times[side]) for side in sides),
                f"{1e3 * _text_seconds(tokens, readers, speeds):.0f}",
                f"{median(times['text']) / ours:.1f}",
                f"{median(times['prefix']) / ours:.2f}",
            )
        )
    head = ("tokens, readers", *(NAMES[side] for side in sides), "text, cost model",
            "text / choreographed", "prefix / choreographed")  # fmt: skip
    return table(head, lines)


def _text_seconds(tokens: int, readers: int, speeds: Mapping[str, float]) -> float:
    """By the arithmetic alone: two operations per weight and token, four per score and dim.

    To the median reader: half of the readers' texts, and its own, come before its first token.
    """
    linear = 2 * speeds["layer_weights"] * tokens
    attention = 2 * speeds["attention_width"] * tokens**2
    return (readers + 1) / 2 * (linear + attention) / speeds["flops"]


def _first_token_model(speeds: Mapping[str, float]) -> str:
    return (
        "Cost model of the text: every reader's tokens pass through "
        f"{speeds['layer_weights'] / 1e6:.0f} million weights, and each is scored against half of "
        f"them on average, at the {speeds['flops'] / 1e9:.0f} Gflop/s of a large matrix product on "
        "this machine, measured in the same run; the median reader waits for half of the others. "
        "Choreographed it is two small steps, the roles' and the headers', whatever is shared."
    )


def _draw_first_token(rows: Rows) -> None:
    by_tokens, by_readers = _points(rows)
    titles = ("One reader", f"Readers of {by_readers[0][0]:,} tokens")
    figure, (left, right) = panels(titles)
    for axes, points, place in ((left, by_tokens, 0), (right, by_readers, 1)):
        x = [point[place] for point in points]
        for side in _sides(rows):
            values = [_times(rows, side, *point) for point in points]
            draw_line(axes, x, values, NAMES[side], COLOURS[side])
        logarithmic(axes)
        axes.set_ylabel("ms to first token", fontsize=9)
        name_ticks(axes, x)
    left.set_xlabel("shared tokens", fontsize=9)
    right.set_xlabel("readers", fontsize=9)
    left.legend(frameon=False, fontsize=8.5)
    save_picture(figure, "scaling_ttft")


# -- decoding ------------------------------------------------------------------------------------


def _readers(rows: Rows) -> list[int]:
    return sorted({int(row["readers"]) for row in rows})


def _steps(rows: Rows, side: str, readers: int, number: Any = None) -> list[float]:
    """Seconds per step."""
    return [
        float(row["step_s"])
        for row in rows
        if row["side"] == side and int(row["readers"]) == readers and number in (None, row["pass"])
    ]


def _ratio(rows: Rows, number: Any, side: str, readers: int = BAR_READERS) -> float:
    """Throughput read together / that of another side."""
    theirs = median(_steps(rows, side, readers, number))
    return theirs / median(_steps(rows, "grouped", readers, number))


def _throughput_table(rows: Rows) -> str:
    sides = _sides(rows)
    lines = [
        (n, *(with_spread([n / s for s in _steps(rows, side, n)]) for side in sides))
        for n in _readers(rows)
    ]
    return table(("readers", *(NAMES[side] for side in sides)), lines)


def _rivals(rows: Rows) -> list[str]:
    """The sides that reading together is compared with."""
    return [side for side in ("ungrouped", "prefix", "stock") if side in _sides(rows)]


def _ratio_table(rows: Rows) -> str:
    lines = [
        (
            f"{number}, {n}",
            *(f"{_ratio(rows, number, side, n):.2f}" for side in _rivals(rows)),
        )
        for number in _passes(rows)
        for n in _readers(rows)
        if n >= BAR_READERS // 2
    ]
    head = ("pass, readers", *(f"together / {NAMES[side]}" for side in _rivals(rows)))
    return table(head, lines)


def _step_model(rows: Rows, speeds: Mapping[str, float]) -> str:
    """Measured step times beside what must be read and multiplied."""
    shared = _shared_bytes(speeds)
    first = (speeds["weight_bytes"] + shared) / speeds["memory_bytes_per_s"]
    lines = []
    for n in _readers(rows):
        floor = 1e3 * median(_steps(rows, "no context", n))
        for side in ("grouped", "ungrouped", "prefix"):
            copies = 1 if side == "grouped" else n
            must = speeds["weight_bytes"] + copies * shared
            again = (copies - 1) * shared / speeds["cache_bytes_per_s"]
            measured = 1e3 * median(_steps(rows, side, n))
            lines.append(
                (
                    f"{n}, {NAMES[side]}",
                    f"{must / 1e9:.2f}",
                    f"{1e3 * must / speeds['memory_bytes_per_s']:.1f}",
                    f"{1e3 * (first + again):.1f}",
                    f"{1e3 * _multiply_seconds(n, speeds):.1f}",
                    f"{measured:.1f}",
                    f"{measured - floor:.1f}",
                )
            )
    head = ("readers, side", "GB to read", "ms at the memory's speed", "ms, repeats at the cache's",
            "ms to multiply", "ms measured", "of these for the messages")  # fmt: skip
    return "\n\n".join([_model_in_words(speeds, shared), table(head, lines), _bound(rows)])


def _multiply_seconds(readers: int, speeds: Mapping[str, float]) -> float:
    """Attention to the messages alone, at the rate of a large matrix product."""
    from benchmarks.bench_scaling import DECODE_CONTEXT

    return readers * DECODE_CONTEXT * 4 * speeds["attention_width"] / speeds["flops"]


def _model_in_words(speeds: Mapping[str, float], shared: float) -> str:
    return (
        f"Cost model: a step reads the weights ({speeds['weight_bytes'] / 1e9:.2f} GB) and the "
        f"messages' keys and values ({shared / 1e9:.2f} GB), once if readers read together, else "
        "once per reader. This machine's memory gave "
        f"{speeds['memory_bytes_per_s'] / 1e9:.0f} GB/s to a sum over 1 GiB in the same run; its "
        f"cache, for an array as large as one layer's messages, "
        f"{speeds['cache_bytes_per_s'] / 1e9:.0f} GB/s; a large matrix product "
        f"{speeds['flops'] / 1e9:.0f} Gflop/s. Where one layer's messages fit the cache, reading "
        "them again costs the cache's time only, and the multiplications of attention, which "
        "reading together does not save, are the larger part. The last column is what is left of "
        "the step without that of readers with nothing to read."
    )


def _bound(rows: Rows) -> str:
    """What ratio would remain if the messages cost nothing."""
    floor = median(_steps(rows, "no context", BAR_READERS))
    bounds = [
        f"{median(_steps(rows, side, BAR_READERS)) / floor:.2f} ({NAMES[side]})"
        for side in _rivals(rows)
    ]
    return (
        f"If reading the messages cost nothing at all, the ratios at {BAR_READERS} readers would "
        f"be {', '.join(bounds)}: no kernel can pass these here, with this model and machine."
    )


def _shared_bytes(speeds: Mapping[str, float]) -> float:
    """Bytes of the messages' keys and values: 4,000 tokens, without padding."""
    from benchmarks.bench_scaling import DECODE_CONTEXT

    return DECODE_CONTEXT * speeds["block_bytes"] / speeds["block_size"]


def _blocks(rows: Rows, side: str, point: tuple[int, int]) -> int:
    return max(
        int(row["blocks"])
        for row in rows
        if (row["side"], int(row["tokens"]), int(row["readers"])) == (side, *point)
    )


def _memory_table(first: Rows, speeds: Mapping[str, float]) -> str:
    _, points = _points(first)
    sides = _sides(first)
    lines = []
    for point in points:
        blocks = [_blocks(first, side, point) for side in sides]
        megabytes = [f"{count * speeds['block_bytes'] / 1e6:.0f}" for count in blocks]
        lines.append((point[1], *blocks, *megabytes, f"{blocks[-1] / blocks[0]:.1f}"))
    head = ("readers", *(f"blocks, {NAMES[side]}" for side in sides),
            *(f"MB, {NAMES[side]}" for side in sides), "text / choreographed")  # fmt: skip
    return (
        f"KV cache in use by the readers of {points[0][0]:,} tokens, roles, headers and answers "
        "included, after the model step in which most was.\n\n" + table(head, lines)
    )


def _draw_decode(first: Rows, decode: Rows, speeds: Mapping[str, float]) -> None:
    _, points = _points(first)
    titles = ("Decoding, readers of 4,000 tokens", f"KV cache, readers of {points[0][0]:,} tokens")
    figure, (left, right) = panels(titles)
    x = _readers(decode)
    for side in _sides(decode):
        values = [[n / s for s in _steps(decode, side, n)] for n in x]
        draw_line(left, x, values, NAMES[side], COLOURS[side])
    left.set_ylabel("tokens per second, all readers", fontsize=9)
    for side in _sides(first):
        megabytes = [[_blocks(first, side, p) * speeds["block_bytes"] / 1e6] for p in points]
        draw_line(right, [readers for _, readers in points], megabytes, NAMES[side], COLOURS[side])
    right.set_ylabel("MB in use", fontsize=9)
    logarithmic(right)
    for axes in (left, right):
        name_ticks(axes, x)
        axes.set_xlabel("readers", fontsize=9)
        axes.legend(frameon=False, fontsize=8.5)
    left.set_ylim(bottom=0)
    save_picture(figure, "scaling_decode")
