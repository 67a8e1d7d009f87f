# SPDX-License-Identifier: Apache-2.0
"""A tiny EAGLE head for a tiny model of the Llama family: its first layer, and a random matrix."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LAYER = "model.layers.0."


def make_eagle_head(target: Path, folder: Path) -> Path:
    """Write the head of a model to a folder, which is returned."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(target / "model.safetensors")
    size = config["hidden_size"]
    torch.manual_seed(1)
    head = {"fc.weight": torch.randn(size, 2 * size) / (2 * size) ** 0.5}
    for name, weight in weights.items():
        if name.startswith(_LAYER) and "input_layernorm" not in name:
            head[f"layers.0.{name.removeprefix(_LAYER)}"] = weight
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
