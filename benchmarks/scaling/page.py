# SPDX-License-Identifier: Apache-2.0
"""The page of scaling, from its CSV files, with the cost models."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread
from benchmarks.scaling.plots import draw_decode, draw_first_token
from benchmarks.scaling.rows import (
    BAR_READERS,
    DECODE_CONTEXT,
    NAMES,
    PREFIX_BAR,
    UNGROUPED_BAR,
    Rows,
    bars_reached,
    blocks_of,
    passes_of,
    points_of,
    ratio,
    reader_counts,
    rivals,
    sides_of,
    step_seconds,
    ttfts,
)


def section() -> str:
    """This benchmark's part of RESULTS.md; draws the plots."""
    first, decode = read_csv("scaling_first_token"), read_csv("scaling_decode")
    if not first or not decode:
        return ""
    speeds = {key: _number(value) for key, value in read_csv("scaling_machine")[0].items()}
    draw_first_token(first)
    draw_decode(first, decode, speeds)
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


# -- time to first token -------------------------------------------------------------------------


def _first_token_table(rows: Rows, speeds: Mapping[str, float]) -> str:
    by_tokens, by_readers = points_of(rows)
    sides = sides_of(rows)
    lines = []
    for tokens, readers in dict.fromkeys([*by_tokens, *by_readers]):
        times = {side: ttfts(rows, side, tokens, readers) for side in sides}
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


# -- decoding ------------------------------------------------------------------------------------


def _throughput_table(rows: Rows) -> str:
    sides = sides_of(rows)
    lines = [
        (n, *(with_spread([n / s for s in step_seconds(rows, side, n)]) for side in sides))
        for n in reader_counts(rows)
    ]
    return table(("readers", *(NAMES[side] for side in sides)), lines)


def _ratio_table(rows: Rows) -> str:
    lines = [
        (
            f"{number}, {n}",
            *(f"{ratio(rows, number, side, n):.2f}" for side in rivals(rows)),
        )
        for number in passes_of(rows)
        for n in reader_counts(rows)
        if n >= BAR_READERS // 2
    ]
    head = ("pass, readers", *(f"together / {NAMES[side]}" for side in rivals(rows)))
    return table(head, lines)


def _step_model(rows: Rows, speeds: Mapping[str, float]) -> str:
    """Measured step times beside what must be read and multiplied."""
    shared = _shared_bytes(speeds)
    first = (speeds["weight_bytes"] + shared) / speeds["memory_bytes_per_s"]
    lines = []
    for n in reader_counts(rows):
        floor = 1e3 * median(step_seconds(rows, "no context", n))
        for side in ("grouped", "ungrouped", "prefix"):
            copies = 1 if side == "grouped" else n
            must = speeds["weight_bytes"] + copies * shared
            again = (copies - 1) * shared / speeds["cache_bytes_per_s"]
            measured = 1e3 * median(step_seconds(rows, side, n))
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
    floor = median(step_seconds(rows, "no context", BAR_READERS))
    bounds = [
        f"{median(step_seconds(rows, side, BAR_READERS)) / floor:.2f} ({NAMES[side]})"
        for side in rivals(rows)
    ]
    return (
        f"If reading the messages cost nothing at all, the ratios at {BAR_READERS} readers would "
        f"be {', '.join(bounds)}: no kernel can pass these here, with this model and machine."
    )


def _shared_bytes(speeds: Mapping[str, float]) -> float:
    """Bytes of the messages' keys and values: 4,000 tokens, without padding."""
    return DECODE_CONTEXT * speeds["block_bytes"] / speeds["block_size"]


def _memory_table(first: Rows, speeds: Mapping[str, float]) -> str:
    _, points = points_of(first)
    sides = sides_of(first)
    lines = []
    for point in points:
        blocks = [blocks_of(first, side, point) for side in sides]
        megabytes = [f"{count * speeds['block_bytes'] / 1e6:.0f}" for count in blocks]
        lines.append((point[1], *blocks, *megabytes, f"{blocks[-1] / blocks[0]:.1f}"))
    head = ("readers", *(f"blocks, {NAMES[side]}" for side in sides),
            *(f"MB, {NAMES[side]}" for side in sides), "text / choreographed")  # fmt: skip
    return (
        f"KV cache in use by the readers of {points[0][0]:,} tokens, roles, headers and answers "
        "included, after the model step in which most was.\n\n" + table(head, lines)
    )
