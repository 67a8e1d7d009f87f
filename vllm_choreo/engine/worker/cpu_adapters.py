# SPDX-License-Identifier: Apache-2.0
"""LoRA on CPU: tokens without an adapter get none.

vLLM marks them with the index -1. Its kernels for GPUs leave those rows out; those for CPUs take -1
for the last adapter's place (vLLM's pull request 48421). A choreographed engine mixes adapters in
one step even if its caller does not: it gives the last token of an answer its keys and values in a
later step. A row of zeros has nothing to add, whatever the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class ChoreoPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's products with adapters, for rows that may have none."""

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_linear(y, _blanked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        super().add_lora_embedding(y, _blanked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_logits(y, _blanked(x, self.sampler_indices), *args, **kwargs)


def _blanked(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x` with zeros in the rows that have no adapter, as `[rows, features]`."""
    return x.reshape(-1, x.shape[-1]).masked_fill((indices < 0)[:, None], 0)


def correct_adapters(lora_manager: Any) -> None:
    """Have the layers of a model use `ChoreoPunicaWrapperCPU`.

    Args:
        lora_manager: of a model runner with LoRA, on any device; only CPUs need it.
    """
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU:  # and not that of a GPU
            wrapper.__class__ = ChoreoPunicaWrapperCPU
