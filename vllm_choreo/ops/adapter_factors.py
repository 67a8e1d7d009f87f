# SPDX-License-Identifier: Apache-2.0
"""Matrices of a low-rank adapter (LoRA, https://arxiv.org/abs/2106.09685) in one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Columns of `shrink` come in so many, filled up with zeros: the C++ kernels read whole vectors.
_RANK_STEP = 16


@dataclass(frozen=True)
class FactorSlice:
    """Second matrix of a pair, of which a layer has one for each part of its output.

    Attributes:
        expand: ``[num_ranks, num_columns]``, contiguous, in the type of the output.
        first_rank: first of its ranks among the columns of ``shrink``.
        first_column: first of its columns of the output.
    """

    expand: torch.Tensor
    first_rank: int
    first_column: int

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.expand.shape[0])

    @property
    def columns(self) -> slice:
        return slice(self.first_column, self.first_column + self.expand.shape[1])


@dataclass(frozen=True, eq=False)
class AdapterFactors:
    """Matrices of one adapter in a layer, for the slices that its training has touched.

    Attributes:
        shrink: float32 ``[in_features, num_ranks]``, the first matrices side by side; contiguous,
            its ranks filled up with zeros to a multiple of 16.
        slices: second matrices, at least one.
    """

    shrink: torch.Tensor
    slices: tuple[FactorSlice, ...]


def factors_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> AdapterFactors | None:
    """Collect the matrices without zeros: vLLM wraps every layer, and fills up with zeros.

    Args:
        pairs: ``[max_rank, in_features]`` and ``[num_columns, max_rank]`` of each slice.
        dtype: dtype of the output.

    Returns:
        None if training has not touched the layer.
    """
    shrink: list[torch.Tensor] = []
    slices: list[FactorSlice] = []
    column = rank = 0
    for a, b in pairs:
        used = (b != 0).any(dim=0).nonzero().flatten()
        if len(used):
            num_ranks = int(used[-1]) + 1
            shrink.append(a[:num_ranks].float())
            expand = b[:, :num_ranks].to(dtype).T.contiguous()
            slices.append(FactorSlice(expand, rank, column))
            rank += num_ranks
        column += len(b)
    if not slices:
        return None
    padding = torch.zeros(-rank % _RANK_STEP, shrink[0].shape[1], device=shrink[0].device)
    return AdapterFactors(torch.cat([*shrink, padding]).T.contiguous(), tuple(slices))
