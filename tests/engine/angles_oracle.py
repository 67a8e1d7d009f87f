# SPDX-License-Identifier: Apache-2.0
"""The dense oracle with the float32 angles that an engine turns queries and keys by.

vLLM turns a new token by a row of a float32 table of cosines and sines: that of its virtual index,
which counts each parent in whole blocks, not that of the position at which it is seen. An angle in
float32 is off by up to 6e-8 of itself, at index 1,000 by 6e-5, and a key of a parent by another
error than a query. Where attention is sharp, that moves log-probabilities by up to 1e-3 from those
of angles in float64, which `Oracle` has. This oracle takes the very rows: what is left of a
difference is the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.oracle import Encoded, Oracle, Parent

_BLOCK_SIZE = 32


class AnglesOracle(Oracle):
    """A dense oracle in the engine's frame: each message stands where vLLM puts its tokens.

    Args:
        llm: the engine, in this process, whose tables are taken.
    """

    # The same text stands elsewhere in the table: between the two are errors of angles alone, which
    # say nothing of the engine.
    stands_as_placed = False

    def __init__(self, model_path: str | Path, llm: Any) -> None:
        super().__init__(model_path)
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        layers = executor.driver_worker.worker.model_runner.get_model().model.layers
        self._tables: dict[str | None, torch.Tensor] = {}
        for kind, layer in zip(self.layer_types, layers, strict=True):
            attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attn
            table = attention.rotary_emb._compute_cos_sin_cache().float()
            self._tables[kind if kind in self.inv_freq else None] = table
        (rotary,) = (m for n, m in self.model.named_modules() if n.endswith("rotary_emb"))
        is_doubled = self.model.config.model_type != "gpt_oss"

        def forward(
            x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
        ) -> tuple[torch.Tensor, ...]:
            rows = self._tables[layer_type][position_ids].chunk(2, dim=-1)
            return tuple(torch.cat((part, part), dim=-1) if is_doubled else part for part in rows)

        rotary.forward = forward

    def encode(
        self, token_ids: Sequence[int], parents: Sequence[Parent] = (), new_offset: int = 0
    ) -> Encoded:
        """Encode a message at its virtual index; parents are shifted by as much as it is."""
        index = _BLOCK_SIZE * sum(
            -(-parent.stop // _BLOCK_SIZE) - parent.start // _BLOCK_SIZE for parent in parents
        )
        shift = index - new_offset
        moved = [replace(parent, offset=parent.offset + shift) for parent in parents]
        return super().encode(token_ids, moved, index)
