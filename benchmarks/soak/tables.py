# SPDX-License-Identifier: Apache-2.0
"""The tables of the soak."""

from __future__ import annotations

from benchmarks.harness.tables import Table, text

# What clients did and got.
COUNTED = (
    "prefill", "decode", "leave", "workflow", "exact", "free", "mistake", "unknown", "refused",
    "ordinary",
)  # fmt: skip
_JUDGED = ("tokens_checked", "wrong_tokens", "failures", "blocks_leaked")
_SHOWN = ("seconds", *COUNTED, "evicted", "encoded_again", *_JUDGED)
TABLES = {
    "soak": Table(
        "soak", {"clients": "clients"}, {name.replace("_", " "): text(name) for name in _SHOWN}
    ),
}
