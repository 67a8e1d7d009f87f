# SPDX-License-Identifier: Apache-2.0
"""The page of ordinary requests, from its CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

BAR = 0.98  # throughput with the plugin / without it, at the same block size
SIDES = ("plugin", "stock", "stock, default blocks")


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("ordinary")
    if not rows:
        return ""
    same = ratios_of(rows, "stock")
    default = ratios_of(rows, "stock, default blocks")
    verdict = "reached" if bar_reached(rows) else "MISSED"
    blocks = {row["side"]: row["block_size"] for row in rows}
    lines = [
        (
            number,
            *(with_spread(_rates(rows, side, number), ".1f") for side in SIDES),
            f"{same[number]:.3f}",
            f"{default[number]:.3f}",
        )
        for number in same
    ]
    head = ["pass", *(f"{side} ({size})" for side, size in blocks.items())]
    return "\n\n".join(
        [
            "## Ordinary requests: what the plugin costs them",
            f"A batch of {rows[0]['requests']} requests ({rows[0]['prompt_tokens']} prompt tokens, "
            f"{rows[0]['generated_tokens']} generated), in tokens per second, both kinds together: "
            "median [quartiles]; block size in brackets; ratios are medians over turns. Without "
            "the plugin no code of it is loaded. "
            f"Bar: ratio at the same block size at least {BAR}: {verdict}.",
            table([*head, "plugin / stock", "plugin / default"], lines),
            _agreement(rows),
            "Cost model: an ordinary batch runs vLLM's own kernels; the plugin adds per model step "
            "a look-up of each request and per layer one test, some microseconds beside a step of "
            f"{_step_ms(rows):.0f} ms, so the expected ratio is 1.",
            machine_line(rows),
        ]
    )


def _step_ms(rows: Sequence[Mapping[str, str]]) -> float:
    """Mean milliseconds of a step: the longest answer takes one step per token."""
    seconds = median(float(row["seconds"]) for row in rows if row["side"] == "stock")
    return 1e3 * seconds / int(rows[0]["longest_answer"])


def _agreement(rows: Sequence[Mapping[str, str]]) -> str:
    other = next(row for row in rows if row["side"] == "stock, default blocks")
    return (
        "Outputs: with the plugin every token is that of stock vLLM at the same block size. At the "
        f"default block size {other['same_tokens_as_stock']} of {other['requests']} answers are "
        "the same (its kernel adds in another order)."
    )


def _rates(rows: Sequence[Mapping[str, Any]], side: str, number: Any) -> list[float]:
    return [
        float(row["tokens_per_s"]) for row in rows if row["side"] == side and row["pass"] == number
    ]


def ratios_of(rows: Sequence[Mapping[str, Any]], rival: str) -> dict[Any, float]:
    """Per pass: median over the turns of (with the plugin / the rival in the same turn)."""
    return {
        number: median(
            ours / theirs
            for ours, theirs in zip(
                _rates(rows, "plugin", number), _rates(rows, rival, number), strict=True
            )
        )
        for number in dict.fromkeys(row["pass"] for row in rows)
    }


def bar_reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the plugin costs as little as it should, in the median of the passes."""
    return median(ratios_of(rows, "stock").values()) >= BAR
