# SPDX-License-Identifier: Apache-2.0
"""The bar of a long session: by how much memory may grow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WARM_CALLS = 10_000  # after which memory must not grow
# Bytes per call that memory may grow by: less than the smallest object that could be left behind
# (an empty dict takes 64), more than what an allocator adds by chance over as many calls.
BAR = 48.0
PROCESSES = {"client": "client_bytes", "engine core": "core_bytes", "worker": "worker_bytes"}
Rows = Sequence[Mapping[str, Any]]


def growth(rows: Rows, column: str) -> float:
    """Bytes per call, after the first ones; of a short run, in its second half. Least squares."""
    start = min(WARM_CALLS, int(rows[-1]["calls"]) // 2)
    found = [row for row in rows if int(row["calls"]) >= start]
    calls = [float(row["calls"]) for row in found]
    return statistics.linear_regression(calls, [float(row[column]) for row in found]).slope


def flat(rows: Rows) -> bool:
    """Check whether neither process grows."""
    return all(growth(rows, column) <= BAR for column in PROCESSES.values())
