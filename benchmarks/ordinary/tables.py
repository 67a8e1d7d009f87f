# SPDX-License-Identifier: Apache-2.0
"""The table of ordinary requests."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Table, middle, of, spread, text
from benchmarks.ordinary.bars import BAR, against

_DEFAULT = "stock, default blocks"


def _rate(side: str) -> Cell:
    return spread(of("tokens_per_s", side=side), ".1f")


TABLES = {
    "ordinary": Table(
        "ordinary",
        {"pass": "pass"},
        {
            "plugin, tokens/s": _rate("plugin"),
            "stock": _rate("stock"),
            _DEFAULT: _rate(_DEFAULT),
            "plugin / stock": middle(against("stock"), ".3f"),
            "bar": lambda rows: BAR,
            "plugin / default": middle(against(_DEFAULT), ".3f"),
            "same answers": text("same_tokens_as_stock", side="plugin"),
            "default blocks": text("same_tokens_as_stock", side=_DEFAULT),
            "of": text("requests"),
        },
    ),
}
