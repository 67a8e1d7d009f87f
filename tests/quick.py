# SPDX-License-Identifier: Apache-2.0
"""What makes engines start sooner: fewer processes, smaller pools, the first layers of a model."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path

# An engine's own process runs the model, instead of a third one: each imports vLLM, 17 s of CPU.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Of 32 tokens each: as many as the embedded model has in 1 GiB. A smaller model would be given that
# GiB, too, and every engine would begin by zeroing it.
NUM_BLOCKS = 728
NUM_LAYERS = 2
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def freeze_what_is_imported() -> None:
    """Leave alone, whenever garbage is collected, what is there now: all that tests have imported.

    An engine that starts or stops collects garbage seven times. To look at some millions of objects
    each time took more than all else that it does: 4 s of 5. What vLLM freezes of an engine, and
    would thaw with everything else when the engine stops, is collected like the rest.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def shallow_copy(model_path: Path, folder: Path) -> Path:
    """Write the first `NUM_LAYERS` layers of `model_path` to `folder`, which is returned."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = "model.safetensors"
    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns(weights))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with safe_open(model_path / weights, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if _is_kept(name)}  # noqa: SIM118
    save_file(kept, folder / weights, metadata={"format": "pt"})
    return folder


def _is_kept(name: str) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer[1]) < NUM_LAYERS
