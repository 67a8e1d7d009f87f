# SPDX-License-Identifier: Apache-2.0
"""LoRA on CPU: two products per adapter of a step, on the tokens that wear it.

vLLM's torch operators for CPUs copy the weights of its adapter for every token, which took as long
as the model's own layers; and tokens without one, marked with the index -1, get the last adapter's
(vLLM's pull request 48421). A choreographed engine mixes adapters in one step even if its caller
does not: it gives the last token of an answer its keys and values in a later step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# Those of a step that wear one adapter; a slice where they lie together.
Rows: TypeAlias = slice | torch.Tensor

# Products of fewer rows sum in another order (measured with MKL). What a message is encoded to is
# not to depend on how many of its tokens a twin had already.
_MIN_ROWS = 16


@dataclass(frozen=True)
class RanksOf:
    """Found for a matrix at a version of it."""

    matrix: torch.Tensor  # held, that its id is nobody else's
    version: int
    ranks: list[int]


class ChoreoPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's products with adapters, for rows that may have none."""

    _worn: list[tuple[int, Rows]]  # of the step: the place of each adapter, and who wears it
    _ranks: dict[int, RanksOf]  # of every second matrix, by its id

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._group_rows()

    def start(self) -> None:
        """Begin to work, as a new one or as what was vLLM's."""
        self._ranks = {}
        self._group_rows()

    def _group_rows(self) -> None:
        is_told = self.indices_len[0] is not None  # of a step; none was, before the first
        self._worn = rows_by_adapter(self.token_lora_indices) if is_told else []

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add to `y`, side by side, the products with each pair of matrices.

        Args:
            y: [num_rows, sum of output_slices]; changed in place.
            x: [num_rows, in_features].
            lora_a_stacked, lora_b_stacked: [num_adapters, 1, rank, in_features] and
                [num_adapters, 1, slice, rank], a pair for each slice.
            scale: of the products.
            output_slices: how many columns of `y` each pair has.
        """
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            for adapter, rows in self._worn:
                if rank := self._rank(b, adapter):
                    # As vLLM has it: to the rank in float32, from there in the type of the output.
                    shrunk = _with_enough_rows(x[rows]) @ a[adapter, 0, :rank].float().T * scale
                    product = shrunk.to(y.dtype) @ b[adapter, 0, :, :rank].to(y.dtype).T
                    target = y[rows, start : start + size]
                    y[rows, start : start + size] = target + product[: len(target)]
            start += size

    def _rank(self, b: torch.Tensor, adapter: int) -> int:
        """Of an adapter in a slice; 0: its training has not touched it.

        vLLM wraps every layer that could have an adapter, and fills up with zeros.
        """
        known = self._ranks.get(id(b))
        if known is None or known.version != b._version:
            known = self._ranks[id(b)] = RanksOf(b, b._version, ranks(b))
        return known.ranks[adapter]

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        super().add_lora_embedding(y, _blanked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_logits(y, _blanked(x, self.sampler_indices), *args, **kwargs)


def rows_by_adapter(indices: torch.Tensor) -> list[tuple[int, Rows]]:
    """Which rows wear which adapter; those without one are in none.

    Args:
        indices: int64 [num_rows]: the place of the adapter, or -1.
    """
    found: list[tuple[int, Rows]] = []
    for adapter in indices.unique().tolist():
        if adapter >= 0:
            rows = (indices == adapter).nonzero().flatten()
            first, last = int(rows[0]), int(rows[-1])
            is_run = last - first + 1 == len(rows)
            found.append((adapter, slice(first, last + 1) if is_run else rows))
    return found


def ranks(b: torch.Tensor) -> list[int]:
    """Of each adapter: behind so many columns there are only zeros.

    Args:
        b: [num_adapters, 1, slice, max_rank].
    """
    is_used = (b != 0).any(dim=2).squeeze(1)  # [num_adapters, max_rank]
    return [int(used.nonzero().max()) + 1 if used.any() else 0 for used in is_used]


def _with_enough_rows(x: torch.Tensor) -> torch.Tensor:
    """In float32, of enough rows that a product does not depend on how many they are."""
    return pad(x.float(), (0, 0, 0, max(_MIN_ROWS - len(x), 0)))


def _blanked(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x` with zeros in the rows that have no adapter, as `[rows, features]`: nothing is added."""
    return x.reshape(-1, x.shape[-1]).masked_fill((indices < 0)[:, None], 0)


def correct_adapters(lora_manager: Any) -> None:
    """Have the layers of a model use `ChoreoPunicaWrapperCPU`.

    Args:
        lora_manager: of a model runner with LoRA, on any device; only CPUs need it.
    """
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU:  # and not that of a GPU
            wrapper.__class__ = ChoreoPunicaWrapperCPU
            wrapper.start()
