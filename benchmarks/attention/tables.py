# SPDX-License-Identifier: Apache-2.0
"""The tables of the attention operation: of one span, and of shared messages."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Row, Rows, Table, middle, of, only, text

HEADS = ("9/3x64", "32/8x128")


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


TABLES = {
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
