# SPDX-License-Identifier: Apache-2.0
"""All tables of the benchmarks, by name."""

from __future__ import annotations

from benchmarks.attention import tables as attention
from benchmarks.checkouts import tables as checkouts
from benchmarks.fleet import tables as fleet
from benchmarks.frontier import tables as frontier
from benchmarks.harness.tables import Table
from benchmarks.keep import tables as keep
from benchmarks.memory import tables as memory
from benchmarks.mixed import tables as mixed
from benchmarks.on_ramps import tables as on_ramps
from benchmarks.ordinary import tables as ordinary
from benchmarks.planner import tables as workers
from benchmarks.planner.agreement import tables as agreement
from benchmarks.planner.moves import tables as moves
from benchmarks.planner.pressure import tables as pressure
from benchmarks.planner.rivals import tables as rivals
from benchmarks.pml import tables as pml
from benchmarks.policies import tables as policies
from benchmarks.quality import tables as quality
from benchmarks.scaling import tables as scaling
from benchmarks.soak import tables as soak
from benchmarks.soak.routes import tables as soak_routes
from benchmarks.sweep import tables as sweep
from benchmarks.training import tables as training
from benchmarks.ttft import tables as ttft
from benchmarks.variants import tables as variants
from benchmarks.workflows import tables as workflows

_FOLDERS = (
    attention, checkouts, fleet, frontier, keep, memory, mixed, on_ramps, ordinary, workers,
    agreement, moves, pressure, rivals, pml, policies, quality, scaling, soak, soak_routes, sweep,
    training, ttft, variants, workflows,
)  # fmt: skip
TABLES: dict[str, Table] = {
    name: table for folder in _FOLDERS for name, table in folder.TABLES.items()
}
