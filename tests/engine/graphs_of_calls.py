# SPDX-License-Identifier: Apache-2.0
"""Random choreographies by full CUDA graphs: `python -m tests.engine.graphs_of_calls MODEL JSON`.

The engine is vLLM's for GPUs, on the device double of `tools/gpu_dry_run`, which captures graphs
and replays them on the same memory. The JSON chooses the seeds, and whether tokens that several
calls read are read together. The last line printed is JSON: how many steps replayed a full graph
of choreographed steps, how many choreographed steps did not, and faults that the double found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.gpu_dry_run import engine
from tools.gpu_dry_run.pretended import pretend


def run(model_path: Path, choices: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, and compare its answers with the dense oracle."""
    name = "full-graphs"
    case = engine.CASES[name]
    double = pretend(case.pretended, **engine.environment(name))
    with double:
        from tests.engine.interpreted import check_choreographies

        settings = {**case.settings, "shared_reading": choices["shared_reading"]}
        options = {**case.options, "max_model_len": 2048, "num_gpu_blocks_override": 256}
        llm = engine.start(model_path, options, settings, double)
        runner = engine.runner_of(llm)
        runner.batcher.min_saved_bytes = 0  # tiny models read together, too
        report = engine.Report()
        engine.watch(runner, report, double)
        check_choreographies(llm, str(model_path), {**choices, "settings": settings})
    planned = report.steps.pop(("choreographed", engine.PLANNED), 0)
    others = sum(count for (kind, _), count in report.steps.items() if kind == "choreographed")
    waits = sorted({f"{sync.where}: {sync.what}" for sync in double.syncs if sync.in_step})
    return {"planned": planned, "others": others, "waits": waits}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), json.loads(sys.argv[2]))))
