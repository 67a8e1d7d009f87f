# SPDX-License-Identifier: Apache-2.0
"""The tables of the attention operation: of one span, and of shared messages."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, middle, of, only, text

HEADS = ("9/3x64", "32/8x128")
SPEED_BAR = 0.9  # of vLLM's speed, at least, of latents and of 8 bits


def _heads(row: Row) -> str:
    return f"{row['num_heads']}/{row['num_kv_heads']}x{row['head_size']}"


def _kind(row: Row) -> str:
    return "decode" if row["q_len"] == "1" else "prefill"


def _range(has_window: bool) -> Cell:
    """Ours / vLLM's: the median over shapes and passes, and the ends."""

    def cell(rows: Rows) -> str:
        ratios = sorted(float(row["ratio"]) for row in rows if bool(row["window"]) == has_window)
        found = middle(lambda _: ratios, ".2f")(rows)
        return f"{found} ({ratios[0]:.2f} to {ratios[-1]:.2f})"

    return cell


def _of_each_pass(heads: str) -> Cell:
    return lambda rows: ", ".join(row["ratio"] for row in only(heads=heads)(rows))


def _speeds(rows: Rows) -> str:
    """How many times as fast as vLLM's: the median over shapes and passes, and the ends."""
    speeds = sorted(float(row["speed"]) for row in rows)
    return f"{middle(of('speed'), '.2f')(rows)} ({speeds[0]:.2f} to {speeds[-1]:.2f})"


def _reads(row: Row) -> str:
    same = row["vllm_kv_cache_dtype"] == row["kv_cache_dtype"]
    return "the same" if same else "the same numbers in float32"


TABLES = {
    "shared_reading_kinds": Table(
        "shared_reading_kinds",
        {"cache": "kind", "heads": "heads"},
        {
            f"{n} readers": middle(of("ratio", readers=n), ".2f") for n in (2, 4, 8, 16, 32)
        },
    ),
    "span_attention_kinds": Table(
        "span_attention_kinds",
        {
            "cache": "kind",
            "heads": "heads",
            "step": lambda row: "decode" if row["queries"] == "1" else "prefill",
            "vLLM reads": _reads,
        },
        {
            "shapes": lambda rows: len({(r["requests"], r["queries"], r["tokens"]) for r in rows}),
            "vLLM's time / ours": _speeds,
            "bar": lambda rows: SPEED_BAR,
        },
    ),
    "shared_reading": Table(
        "shared_reading",
        {"readers": "readers"},
        {
            f"{name}, {heads}": cell
            for heads in HEADS
            for name, cell in (
                ("alone, ms", text("alone_ms", heads=heads)),
                ("together, ms", text("together_ms", heads=heads)),
                ("ratio", _of_each_pass(heads)),
            )
        },
    ),
    "shared_reading_planning": Table(
        "shared_reading_planning",
        {"pass": "pass"},
        {
            "new requests, ms": middle(of("new"), ".2f"),
            "the same ones, ms": middle(of("kept"), ".3f"),
        },
    ),
    "span_attention": Table(
        ("span_attention_1", "span_attention_2"),
        {"heads": _heads, "step": _kind},
        {
            "shapes": lambda rows: len({(r["num_reqs"], r["q_len"], r["kv_len"], r["window"])
                                        for r in rows}),
            "ours / vLLM's": _range(False),
            "with a window": _range(True),
        },
    ),
}  # fmt: skip
