# SPDX-License-Identifier: Apache-2.0
"""The tables of the time to first token, and of where it goes."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.tables import Cell, Rows, Table, Values, middle, of, ratio, spread
from benchmarks.ttft.bars import BAR, MODES, ttfts

_BASELINE, _CHOREO = (partial(ttfts, mode=mode) for mode in MODES)


def _ms(seconds: Values) -> Values:
    return lambda rows: [1e3 * value for value in seconds(rows)]


def _late(rows: Rows) -> Rows:
    return [row for row in rows if int(row["round"]) > 1]


_SIDES: dict[str, Cell] = {
    "baseline, ms": spread(_ms(_BASELINE), ".0f"),
    "choreographed, ms": spread(_ms(_CHOREO), ".0f"),
    "ratio": ratio(_BASELINE, _CHOREO, ".1f"),
}
ENGINE_TABLES = {"ttft_engines": Table("ttft_engines", {"engine": "engine"}, _SIDES)}
TABLES = {
    **ENGINE_TABLES,
    "ttft": Table("ttft", {"pass": "pass"}, {**_SIDES, "bar": lambda rows: BAR}),
    "ttft_parts": Table(
        "ttft_parts",
        {"part": "part"},
        {f"{mode}, ms": middle(of("ms", mode=mode), ".1f") for mode in MODES},
        rows=_late,
    ),
}
