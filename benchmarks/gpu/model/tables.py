# SPDX-License-Identifier: Apache-2.0
"""The tables of the cost model, which docs/gpu.md shows."""

from __future__ import annotations

import math

from benchmarks.gpu.model.cost import GRAPHS, STOCK, TODAY
from benchmarks.harness.tables import Cell, Row, Rows, Table, middle, of, only, stored

MODEL, WORKFLOW = "Llama-3.1-8B", "parallel debate"


def _gpus(row: Row) -> str:
    return f"{row['gpus']} x {row['gpu']}"


def _figures(rows: Rows) -> dict[str, Cell]:
    del rows
    return {
        "first token, stock, ms": middle(of("ttft_mean_ms", side=STOCK.name), ".0f"),
        "choreographed": stored("ttft_mean_ms", ".0f", side=TODAY.name),
        "ratio": stored("first_token_ratio", ".1f", side=TODAY.name),
        "step, stock, ms": middle(of("decode_step_ms", side=STOCK.name), ".1f"),
        "choreographed, step": middle(of("decode_step_ms", side=TODAY.name), ".1f"),
        "ratio, all": stored("total_ratio", ".2f", side=TODAY.name),
        "full graphs, all": stored("total_ratio", ".2f", side=GRAPHS.name),
    }


def _answer(read: int, side: str) -> Cell:
    """Tokens of the longest answer that gains."""

    def cell(rows: Rows) -> str:
        (found,) = only(read_tokens=read, side=side)(rows)
        tokens = float(found["break_even_tokens"])
        return "all" if math.isinf(tokens) else f"{tokens:.0f}" if tokens else "none"

    return cell


def _least_read(side: str) -> Cell:
    """Fewest tokens, of those tried, that are read sooner than encoded."""

    def cell(rows: Rows) -> str:
        gains = [r for r in only(side=side)(rows) if float(r["first_token_ratio"]) > 1]
        return gains[0]["read_tokens"] if gains else "none"

    return cell


TABLES = {
    "gpu_model": Table(
        "gpu_model",
        {"GPUs": _gpus, "model": "model"},
        _figures,
        rows=only(workflow=WORKFLOW),
    ),
    "gpu_model_workflows": Table(
        "gpu_model",
        {"workflow": "workflow", "GPU": "gpu"},
        _figures,
        rows=only(model=MODEL),
    ),
    "gpu_model_lengths": Table(
        "gpu_model_lengths",
        {"GPU": "gpu", "readers": "readers"},
        {
            "first token: tokens read, at least": _least_read(TODAY.name),
            "of 1,024 tokens read: answer, at most": _answer(1024, TODAY.name),
            "of 8,192": _answer(8192, TODAY.name),
        },
        rows=only(model=MODEL),
    ),
}
