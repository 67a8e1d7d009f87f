# SPDX-License-Identifier: Apache-2.0
"""LoRA on CPU: two products per adapter of a step, on the tokens that wear it.

vLLM's torch operators for CPUs copy the weights of its adapter for every token, which took as long
as the model's own layers; and tokens without one, marked with the index -1, get the last adapter's
(vLLM's pull request 48421). A choreographed engine mixes adapters in one step even if its caller
does not: it gives the last token of an answer its keys and values in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
class Factors:
    """Those of one adapter in a layer, of the slices that its training has touched.

    Attributes:
        shrink: float32 [in_features, sum of ranks].
        expand: of each slice its columns of the output, its columns of what is shrunk, and
            [rank, slice] in the type of the output.
    """

    shrink: torch.Tensor
    expand: list[tuple[slice, slice, torch.Tensor]]


@dataclass
class LayerFactors:
    """What is known of a layer's adapters at a version of their weights."""

    held: torch.Tensor  # by whose id it is found: as long as it lives, nobody else has that id
    versions: list[int] | None
    by_adapter: dict[int, Factors | None] = field(default_factory=dict)


class ChoreoPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's products with adapters, for rows that may have none."""

    _worn: list[tuple[int, Rows]]  # of the step: the place of each adapter, and who wears it
    _layers: dict[int, LayerFactors]  # of each layer, by the id of its first `lora_b_stacked`

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._group_rows()

    def start(self) -> None:
        """Begin to work, as a new one or as what was vLLM's."""
        self._layers = {}
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
        for adapter, rows in self._worn:
            factors = self._factors(adapter, lora_a_stacked, lora_b_stacked, y.dtype)
            if factors is None:
                continue
            is_run = isinstance(rows, slice) and rows.stop - rows.start >= _MIN_ROWS
            given, target = (x[rows], y[rows]) if is_run else (_padded(x[rows]), _padded(y[rows]))
            # As vLLM has it: to the rank in float32, from there in the type of the output.
            shrunk = (given.float() @ factors.shrink * scale).to(y.dtype)
            for columns, ranks, expand in factors.expand:
                target[:, columns].addmm_(shrunk[:, ranks], expand)
            if not is_run:
                y[rows] = target[: len(x[rows])]

    def _factors(
        self,
        adapter: int,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
    ) -> Factors | None:
        """Of an adapter in a layer; None: its training has not touched it."""
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


def factors_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> Factors | None:
    """What there is to multiply with: vLLM wraps every layer, and fills up with zeros.

    Args:
        pairs: of each slice, [max_rank, in_features] and [slice, max_rank].
        dtype: of the output.
    """
    shrink: list[torch.Tensor] = []
    expand: list[tuple[slice, slice, torch.Tensor]] = []
    column = start = 0
    for a, b in pairs:
        used = (b != 0).any(dim=0).nonzero().flatten()
        if len(used):
            rank = int(used[-1]) + 1
            shrink.append(a[:rank].float())
            columns, ranks = slice(column, column + len(b)), slice(start, start + rank)
            expand.append((columns, ranks, b[:, :rank].to(dtype).T))
            start += rank
        column += len(b)
    return Factors(torch.cat(shrink).T.contiguous(), expand) if shrink else None


def _versions(weights: Sequence[torch.Tensor]) -> list[int] | None:
    """Counts of what was written into them; None: nobody counts, so what is known is not kept."""
    if any(one.is_inference() for one in weights):
        return None
    return [one._version for one in weights]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """A copy of enough rows that a product does not depend on how many they are."""
    return pad(x, (0, 0, 0, max(_MIN_ROWS - len(x), 0)))


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
