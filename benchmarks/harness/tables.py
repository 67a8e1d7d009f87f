# SPDX-License-Identifier: Apache-2.0
"""Numbers into words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.stats import median, spread
from vllm_choreo.judge.stats import bootstrap_interval


def with_spread(values: Iterable[float], form: str = ".0f") -> str:
    """`median [first quartile, third quartile]`."""
    found = list(values)
    low, high = spread(found)
    return f"{median(found):{form}} [{low:{form}}, {high:{form}}]"


def with_interval(values: Sequence[float], form: str) -> str:
    """`median [low, high]`, the 95% bootstrap interval."""
    low, high = bootstrap_interval(values)
    return f"{median(values):{form}} [{low:{form}}, {high:{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
