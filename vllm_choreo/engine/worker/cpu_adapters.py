# SPDX-License-Identifier: Apache-2.0
"""LoRA on CPU: two products per adapter of a step, on the tokens that use it.

vLLM's torch operators for CPUs copy the weights of its adapter for every token, which took as long
as the model's own layers; and tokens without one, marked with the index -1, get the last adapter's
(vLLM's pull request 48421). A choreographed engine mixes adapters in one step even if its caller
does not: it gives the last token of an answer its keys and values in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_choreo.ops import AdapterFactors, add_adapter, factors_of

if TYPE_CHECKING:
    from vllm.lora.worker_manager import WorkerLoRAManager


@dataclass
class LayerFactors:
    """Factors of a layer's adapters, at a version of their weights."""

    held: torch.Tensor  # by whose id it is found: as long as it lives, nobody else has that id
    versions: list[int] | None
    by_adapter: dict[int, AdapterFactors | None] = field(default_factory=dict)


class ChoreoPunicaWrapperCPU(PunicaWrapperCPU):
    """Products with adapters in place of vLLM's, for rows that may have none."""

    _rows_of: dict[int, torch.Tensor]  # of the step: see `rows_by_adapter`
    _layers: dict[int, LayerFactors]  # of each layer, by the id of its first `lora_b_stacked`

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._group_rows()

    def start(self) -> None:
        """Set up a new wrapper, or one that was vLLM's."""
        self._layers = {}
        self._group_rows()

    def _group_rows(self) -> None:
        has_step = self.indices_len[0] is not None  # of a step; none was, before the first
        self._rows_of = rows_by_adapter(self.token_lora_indices) if has_step else {}

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: object,
    ) -> None:
        """Add to `y`, side by side, the products with each pair of matrices.

        Args:
            y: [num_rows, sum of output_slices]; changed in place.
            x: [num_rows, in_features].
            lora_a_stacked, lora_b_stacked: [num_adapters, 1, rank, in_features] and
                [num_adapters, 1, slice, rank], a pair for each slice.
            scale: factor of the products.
            output_slices: number of columns of `y` of each pair.
        """
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        for adapter, rows in self._rows_of.items():
            factors = self._factors(adapter, lora_a_stacked, lora_b_stacked, y.dtype)
            if factors is not None:
                add_adapter(y, x, rows, factors, scale)

    def _factors(
        self,
        adapter: int,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
    ) -> AdapterFactors | None:
        """Factors of an adapter in a layer; None: its training has not touched the layer."""
        # vLLM writes an adapter into the place of another one, and does not say so here.
        layer, versions = self._layers.get(id(b[0])), _versions([*a, *b])
        if layer is None or versions is None or layer.versions != versions:
            layer = self._layers[id(b[0])] = LayerFactors(b[0], versions)
        if adapter not in layer.by_adapter:
            pairs = [(one[adapter, 0], other[adapter, 0]) for one, other in zip(a, b, strict=True)]
            layer.by_adapter[adapter] = factors_of(pairs, dtype)
        return layer.by_adapter[adapter]

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        super().add_lora_embedding(y, _blanked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_logits(y, _blanked(x, self.sampler_indices), *args, **kwargs)


def rows_by_adapter(indices: torch.Tensor) -> dict[int, torch.Tensor]:
    """Rows that use an adapter, int64 [n], by its place; rows without one are left out.

    Args:
        indices: int64 [num_rows], the place of each row's adapter, or -1.
    """
    adapters = [adapter for adapter in indices.unique().tolist() if adapter >= 0]
    return {adapter: (indices == adapter).nonzero().flatten() for adapter in adapters}


def _versions(weights: Sequence[torch.Tensor]) -> list[int] | None:
    """Versions that torch counts of tensors; None: it does not, so factors are not kept."""
    if any(one.is_inference() for one in weights):
        return None
    return [one._version for one in weights]


def _blanked(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x` with zeros in the rows that have no adapter, as `[rows, features]`: nothing is added."""
    return x.reshape(-1, x.shape[-1]).masked_fill((indices < 0)[:, None], 0)


def correct_adapters(lora_manager: WorkerLoRAManager) -> None:
    """Have the layers of a model use `ChoreoPunicaWrapperCPU`.

    Args:
        lora_manager: LoRA manager of a model runner, on any device; only CPUs need the change.
    """
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU:  # and not that of a GPU
            wrapper.__class__ = ChoreoPunicaWrapperCPU
            wrapper.start()
