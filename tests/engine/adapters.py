# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.engine.oracle import Oracle
from vllm_choreo.trained_adapter import ModelIdentity, TrainedAdapter

RANK = 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


class Adapter:
    """A random adapter on disk, and the oracle of the model with the adapter merged into it.

    Args:
        model_path: of the model; its oracle is made anew.
        folder: where the adapter's own folder goes.
        number: its id, from 1.
        seed: of its weights; None: its number.

    Attributes:
        path, model_path: of its folder, and of its model's.
        request: vLLM's name for it.
        oracle: of model and adapter together.
    """

    def __init__(
        self, model_path: Path, folder: Path, number: int, seed: int | None = None
    ) -> None:
        self.path = path = folder / f"adapter-{number}"
        self.model_path = model_path
        self.request = LoRARequest(path.name, number, str(path))
        self.oracle = Oracle(model_path)
        generator = torch.Generator().manual_seed(number if seed is None else seed)
        tensors = {}
        for name, module in self.oracle.model.named_modules():
            if name.endswith(MODULES):
                num_out, num_in = module.weight.shape
                down = torch.randn(RANK, num_in, generator=generator) / num_in**0.5
                up = torch.randn(num_out, RANK, generator=generator) / RANK**0.5
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
                module.weight.data += up @ down  # lora_alpha / r is 1
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": MODULES}
        (path / "adapter_config.json").write_text(json.dumps(config))

    def placed(self, placement: str, base: Path | None = None) -> Path:
        """A copy of the folder as training leaves it; `base`: another model than its own."""
        folder = self.path.with_name(f"{self.path.name}-{placement}-{base.name if base else ''}")
        if not folder.exists():
            shutil.copytree(self.path, folder)
            TrainedAdapter(placement, ModelIdentity.of(base or self.model_path), "kl").save(folder)
        return folder
