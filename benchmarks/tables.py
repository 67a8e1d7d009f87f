# SPDX-License-Identifier: Apache-2.0
"""All tables of the benchmarks, by name."""

from __future__ import annotations

from benchmarks.attention import tables as attention
from benchmarks.checkouts import tables as checkouts
from benchmarks.fleet import tables as fleet
from benchmarks.frontier import tables as frontier
from benchmarks.gpu.engine import tables as gpu_engine
from benchmarks.gpu.model import tables as gpu_model
from benchmarks.harness.tables import Table
from benchmarks.inside import tables as inside
from benchmarks.keep import tables as keep
from benchmarks.memory import tables as memory
from benchmarks.mixed import tables as mixed
from benchmarks.on_ramps import tables as on_ramps
from benchmarks.ordinary import tables as ordinary
from benchmarks.paper import tables as paper
from benchmarks.planner import tables as workers
from benchmarks.planner.agreement import tables as agreement
from benchmarks.planner.moves import tables as moves
from benchmarks.planner.pressure import tables as pressure
from benchmarks.planner.rivals import tables as rivals
from benchmarks.pml import tables as pml
from benchmarks.policies import tables as policies
from benchmarks.quality import tables as quality
from benchmarks.rivals import tables as rival_settings
from benchmarks.scaling import tables as scaling
from benchmarks.serve import tables as serve
from benchmarks.soak import tables as soak
from benchmarks.soak.routes import tables as soak_routes
from benchmarks.states import tables as states
from benchmarks.sweep import tables as sweep
from benchmarks.training import tables as training
from benchmarks.ttft import tables as ttft
from benchmarks.variants import tables as variants
from benchmarks.workflows import tables as workflows

_FOLDERS = (
    attention,
    checkouts,
    fleet,
    frontier,
    gpu_engine,
    gpu_model,
    inside,
    keep,
    memory,
    mixed,
    on_ramps,
    ordinary,
    paper,
    workers,
    agreement,
    moves,
    pressure,
    rivals,
    pml,
    policies,
    quality,
    rival_settings,
    scaling,
    serve,
    soak,
    soak_routes,
    states,
    sweep,
    training,
    ttft,
    variants,
    workflows,
)
TABLES: dict[str, Table] = {
    name: table for folder in _FOLDERS for name, table in folder.TABLES.items()
}
