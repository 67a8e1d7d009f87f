# SPDX-License-Identifier: Apache-2.0
"""Memory at fixed addresses for the plans of steps that replay full CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_choreo.engine.worker.layer_kinds import LayerKind
from vllm_choreo.ops import Rotation, SharedReads, SpanBatch, SpanPlan

# Of a step with as many requests as its graph has; a step with more is run by piecewise graphs.
_SPANS_PER_REQUEST = 64


class PlanRoom:
    """Room for the plans of a group of layers: graphs are captured over it, and steps fill it.

    Args:
        kinds: kinds of the group's layers, by their indices.
        num_requests: the most that a step has, one query each.
        block_size: tokens in a KV block.
        is_shared: whether requests read together what they have in common.
        device, workspace: see `SpanPlan`.

    Attributes:
        num_requests, num_spans: the most that a step has, own spans included.
    """

    def __init__(
        self,
        kinds: Mapping[int, LayerKind],
        num_requests: int,
        block_size: int,
        is_shared: bool,
        device: torch.device,
        workspace: torch.Tensor | None,
    ) -> None:
        from vllm_choreo.ops.triton import make_room

        self.num_requests = num_requests
        self.num_spans = _SPANS_PER_REQUEST * num_requests
        self._kinds, self._block_size, self._device = kinds, block_size, device
        self._workspace = workspace
        self._tiles = {
            shape: make_room(
                num_requests, self.num_spans, is_shared, device=device, **shape._asdict()
            )
            for shape in {kind.shape for kind in kinds.values()}
        }
        self._angles: dict[Rotation | None, torch.Tensor | None] = {
            rotation: rotation and torch.zeros(self.num_spans, rotation.rotary_dim, device=device)
            for rotation in {kind.rotation for kind in kinds.values()}
        }
        self._plans: dict[int, dict[int, SpanPlan]] = {}

    def fill(
        self,
        num_requests: int,
        spans: SpanBatch,
        reads: SharedReads | None,
        angles: Mapping[Rotation | None, torch.Tensor | None],
    ) -> None:
        """Have graphs that are replayed from now on read a batch, which fits.

        Args:
            num_requests: requests of the graph.
            angles: cosines and sines of the spans, by rotation.
        """
        from vllm_choreo.ops.triton import fill_room

        for shape, room in self._tiles.items():
            fill_room(room, num_requests, spans, reads, device=self._device, **shape._asdict())
        for rotation, kept in self._angles.items():
            found = angles[rotation]
            if kept is not None and found is not None:
                kept[: len(found)] = found

    def set_own_tokens(self, seq_lens: torch.Tensor, bases: torch.Tensor) -> None:
        """Tell graphs how many own tokens requests have, on the device.

        Args:
            seq_lens, bases: int32 `[num_reqs]`, ends and beginnings of their own spans.
        """
        for room in self._tiles.values():
            torch.sub(seq_lens, bases, out=room.own_tokens[: len(bases)])

    def plans(self, num_requests: int, block_table: torch.Tensor) -> dict[int, SpanPlan]:
        """Plans that a graph of so many requests reads, by the kinds' indices: always the same.

        Args:
            block_table: int32 `[num_reqs, max_blocks]`, where it lies in every step.
        """
        if num_requests not in self._plans:
            none = torch.zeros(self.num_spans, dtype=torch.int32)
            starts = torch.zeros(num_requests + 1, dtype=torch.int32)
            # Kernels read all but the table from the tiles.
            spans = SpanBatch(starts, block_table, starts, none, none, none, none, self._block_size)
            self._plans[num_requests] = {
                index: SpanPlan(
                    *(spans, self._angles[kind.rotation], None),
                    *(self._tiles[kind.shape].tiles(num_requests), self._workspace),
                )
                for index, kind in self._kinds.items()
            }
        return self._plans[num_requests]
