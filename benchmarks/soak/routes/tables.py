# SPDX-License-Identifier: Apache-2.0
"""The tables of the soak of all routes: its lives, and its operations."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Table, text

_TIMES = [f"p{share}_ms_{phase}" for phase in ("idle", "attack", "load") for share in (50, 99)]
_STATUSES = ("200", "400", "404", "409", "413", "429", "others", "hung up", "no answer")
_LIFE: dict[str, Cell] = {
    "requests": text("requests"),
    **{name.replace("_ms_", ", ms, "): text(name) for name in _TIMES},
    "memory, MiB": text("memory_mib"),
    "then killed": text("killed"),
    "ended after, s": text("seconds_to_end"),
    "processes left": text("processes_left"),
    "problems": text("problems"),
}
TABLES = {
    "soak_lives": Table("soak_lives", {"life": "life"}, _LIFE),
    "soak_routes": Table(
        "soak_routes",
        {"operation": "operation"},
        {name: text(name) for name in ("requests", *_STATUSES)},
    ),
}
