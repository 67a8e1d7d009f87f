# SPDX-License-Identifier: Apache-2.0
"""Variants of tiny models: other weights, and a tokenizer written anew, as a fine-tune does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 4


def make_variant(model_path: Path, folder: Path, seed: int = 1) -> Path:
    """A copy of a model whose matrices have a random change of low rank added."""
    variant = folder / f"{model_path.name}-variant-{seed}"
    shutil.copytree(model_path, variant)
    generator = torch.Generator().manual_seed(seed)
    for path in variant.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dim() >= 2 and "layers" in name:  # experts have matrices by the number
                num_out, num_in = tensor.shape[-2:]
                up = torch.randn(num_out, RANK, generator=generator)
                down = torch.randn(RANK, num_in, generator=generator)
                tensors[name] = tensor + (up @ down).to(tensor.dtype) / (RANK * num_in) ** 0.5
        save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = variant / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text())) + "\n")
    return variant
