# SPDX-License-Identifier: Apache-2.0
"""The tables of the simulated fleet, and of the soak of a real one."""

from __future__ import annotations

from benchmarks.harness.tables import Row, Table, middle, of, over, text


def _size(row: Row) -> str:
    return f"{int(row['engines']):,} engines, {int(row['sessions']):,} sessions"


TABLES = {
    "fleet": Table(
        "fleet",
        {"placement": "policy", "size": _size},
        {
            "encoded / prompt": middle(over(of("encoded_tokens"), of("prompt_tokens")), ".3f"),
            "moved / prompt": middle(over(of("moved_tokens"), of("prompt_tokens")), ".3f"),
            "busy": text("busy"),
            "busiest / mean": text("imbalance"),
            "wait p50, ms": text("wait_p50_ms"),
            "wait p95, ms": text("wait_p95_ms"),
            "placing, µs": text("place_us"),
        },
    ),
}
_COUNTED = (
    *("calls", "kills", "restarts", "moved", "failed_moves", "encoded_again", "seconds"),
    *("tokens_checked", "wrong_tokens", "lost_sessions", "failed_calls", "blocks_left"),
)
SOAK = Table(
    "fleet_soak",
    {"engines": "engines", "sessions": "sessions"},
    {name.replace("_", " "): text(name) for name in _COUNTED},
)
TABLES["fleet_soak"] = SOAK
