# SPDX-License-Identifier: Apache-2.0
"""The pages of the attention operation, from its CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table

COMMAND = "benchmarks.attention --rounds 7 --csv"
PLANNED = (32, 16, 250)  # requests, spans of each, tokens of a span


def section() -> str:
    """The part of RESULTS.md on one span, from one CSV file per pass."""
    passes = [rows for n in (1, 2) if (rows := read_csv(f"span_attention_{n}"))]
    if not passes:
        return ""
    lines = []
    for i, row in enumerate(passes[0]):
        cells = [_cell(rows[i]) for rows in passes]
        times = [f"{float(row[side]) / 1e3:.2f}" for side in ("vllm_us", "ours_us")]
        lines.append((_shape(row), *times, *cells))
    head = ["shape", "vLLM, ms", "ours, ms", *(f"ratio, pass {i + 1}" for i in range(len(passes)))]
    row = passes[0][0]
    return "\n\n".join(
        [
            "## Attention kernel against vLLM's, one span",
            "Times of the first pass; ratio ours / vLLM's: median [quartiles], below 1 is faster. "
            "Query heads / KV heads x head size.",
            table(head, lines),
            "Cost model: decode is bound by reading keys and values, which both sides read once "
            "(expected ratio 1); prefill by multiply-adds of the two matrix products.",
            f"`python -m {COMMAND} FILE`. {row['cpus']} cores, {row['threads']} "
            f"threads, kernels {row['isa']}, torch {row['torch']}, vLLM {row['vllm']}.",
        ]
    )


def _shape(row: Mapping[str, str]) -> str:
    kind = "decode" if row["q_len"] == "1" else f"prefill {row['q_len']}"
    heads = f"{row['num_heads']}/{row['num_kv_heads']}x{row['head_size']}"
    window = f", window of {row['window']}" if row.get("window") else ""
    return f"{kind}, {row['num_reqs']} requests, {row['kv_len']} tokens, {heads}{window}"


def _cell(row: Mapping[str, str]) -> str:
    values: Sequence[float] = [float(row[name]) for name in ("ratio", "ratio_q1", "ratio_q3")]
    return "{:.2f} [{:.2f}, {:.2f}]".format(*values)


# -- shared messages ---------------------------------------------------------------------------


def shared_reading_section() -> str:
    """The part of RESULTS.md."""
    rows = read_csv("shared_reading")
    if not rows:
        return ""
    plans = read_csv("shared_reading_planning")
    num_reqs, num_spans, tokens = PLANNED
    keys = list(dict.fromkeys((row["heads"], row["readers"]) for row in rows))
    lines = []
    for heads, readers in keys:
        found = [r for r in rows if (r["heads"], r["readers"]) == (heads, readers)]
        first = found[0]
        lines.append(
            (f"{heads}, {readers} readers", first["alone_ms"], first["together_ms"],
             first["gflops"], first["gb_s"], *map(_ratio, found))
        )  # fmt: skip
    passes = [f"ratio, pass {row['pass']}" for row in plans]
    kept = ", ".join(f"{float(row['kept']):.3f}" for row in plans)
    new = ", ".join(f"{float(row['new']):.2f}" for row in plans)
    return "\n\n".join(
        [
            "## Reading shared messages once: the attention operation",
            "One decode step of readers of the same 8 messages, 4,000 tokens together, half of "
            "them in the reverse order, each at positions of its own; milliseconds per layer "
            "(first pass), float32. Ratio alone / together: median [quartiles].",
            table(
                ["query heads / KV heads x size", "alone", "together", "GFLOP/s together",
                 "GB/s together", *passes],
                lines,
            ),
            "Cost model: alone, keys and values pass the core once per reader; together once, and "
            "the time is that of the multiply-adds, 4 x readers x heads x size x tokens. The gain "
            "grows with what does not fit into the last cache (4,000 tokens of one layer: 6 MB at "
            "9/3x64, 33 MB at 32/8x128), since there each reader alone fetches it from memory.",
            f"Planning on the CPU for {num_reqs} requests with {num_spans} spans of {tokens} "
            f"tokens each: {new} ms in a step in which requests start or end (laying out, checking "
            f"and grouping together), {kept} ms in all others (passes in order). Decode steps of "
            f"32 readers of as many tokens are measured under scaling.",
            machine_line(rows),
        ]
    )  # fmt: skip


def _ratio(row: dict[str, str]) -> str:
    return f"{row['ratio']} [{row['ratio_q1']}, {row['ratio_q3']}]"
