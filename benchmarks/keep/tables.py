# SPDX-License-Identifier: Apache-2.0
"""The table of kept messages."""

from __future__ import annotations

from benchmarks.harness.tables import Table, of, spread, text
from benchmarks.keep.bars import BAR, ratios

TABLES = {
    "keep": Table(
        "keep",
        {"tokens": "tokens"},
        {
            "messages": text("messages"),
            "MB": text("megabytes"),
            "encode, s": spread(of("encode_s"), ".2f"),
            "save, s": spread(of("save_s"), ".2f"),
            "load, s": spread(of("load_s"), ".2f"),
            "encode / load": spread(ratios, ".1f"),
            "bar": lambda rows: f"{BAR:g}",
        },
    ),
}
