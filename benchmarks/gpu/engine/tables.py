# SPDX-License-Identifier: Apache-2.0
"""The tables of what was measured on a GPU, which docs/gpu.md shows."""

from __future__ import annotations

from benchmarks.harness.tables import Row, Table, middle, of, over, ratio, stored, text

OURS, STOCK = "choreo", "baseline"


def _case(row: Row) -> str:
    return f"{row['model']}, {row['runner']}, {row['dtype']}"


def _work(row: Row) -> str:
    parts = [row["model"], f"{row['kind']} {row['queries']}", f"{row['requests']} requests"]
    read = f"{row['shared_tokens']} tokens in {row['spans']} spans, {row['own_tokens']} own"
    return ", ".join([*parts, read])


TABLES = {
    "gpu_engine": Table(
        "gpu_engine",
        {"workflow": "workflow"},
        {
            "first token, text, ms": stored("ttft_ms", ".1f", mode=STOCK),
            "choreographed": stored("ttft_ms", ".1f", mode=OURS),
            "ratio": ratio(of("ttft_ms", mode=STOCK), of("ttft_ms", mode=OURS), ".1f"),
            "step, text, ms": middle(of("step_ms", mode=STOCK), ".2f"),
            "choreographed, step": middle(of("step_ms", mode=OURS), ".2f"),
            "all, text, s": stored("seconds", ".2f", mode=STOCK),
            "choreographed, all": stored("seconds", ".2f", mode=OURS),
            "ratio, all": ratio(of("seconds", mode=STOCK), of("seconds", mode=OURS), ".2f"),
            "encoded, text": text("encoded_tokens", mode=STOCK),
            "choreographed, encoded": text("encoded_tokens", mode=OURS),
        },
    ),
    "gpu_engine_laws": Table(
        "gpu_engine_laws",
        {"engine": _case, "law": "law"},
        {
            "largest difference": middle(of("difference"), ".1e"),
            "allowed": middle(of("allowed"), ".1e"),
        },
    ),
    "gpu_attention": Table(
        "gpu_attention",
        {"a layer's attention": _work},
        {
            "read together, µs": text("grouped_us"),
            "each alone": text("ungrouped_us"),
            "PyTorch": text("SDPA_us"),
            "FlexAttention": text("FlexAttention_us"),
            "floor": text("floor_us"),
            "PyTorch / ours": middle(over(of("SDPA_us"), of("ungrouped_us")), ".2f"),
        },
    ),
}
