# SPDX-License-Identifier: Apache-2.0
"""The spans of the batch, from the scheduler's plans to what the attention backend reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_not
from typing import NamedTuple

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.ops import Rotation, SharedReads, SpanBatch, plan_shared_reads
from vllm_choreo.ops.tiles import MIN_SPLIT_TOKENS, Tiles

_ORDINARY = RequestSpans((), (), (), (), 0)


class LayerShape(NamedTuple):
    """What a layer's tiles depend on; heads are those of this worker's share."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ChoreoBatch:
    """What a step adds to vLLM's attention metadata.

    Attributes:
        spans: of all requests of the batch, ordinary ones included. In host memory, but for the
            block table, which lies where the cache does.
        cos_sin: per rotation that the model has, float32 `[num_spans, rotary_dim]`, there too.
        reads: what several of the requests attend to; None if nothing is, or if it is read by
            each of them alone.
        tiles: per shape of a layer, how its work is cut; empty for kernels that cut it themselves.
    """

    spans: SpanBatch
    cos_sin: Mapping[Rotation, torch.Tensor]
    reads: SharedReads | None
    tiles: Mapping[LayerShape, Tiles]


class BatchPlanner:
    """Keeps the spans of running requests and lays them out for a batch.

    Between two steps of the same requests only the own spans grow, so the rest is kept: laying
    out, grouping, rotating and cutting cost nothing in a decode step. Nothing here waits for a
    device.

    Args:
        block_size: tokens in a KV block.
        rotations: that the model's layers have.
        shared_reading: see the attribute.
        device: of the KV cache.
        tile_shapes: of the layers, for kernels that take tiles (`impl="triton"`).

    Attributes:
        shared_reading: read what several requests attend to once for all of them. May be set
            between two steps.
        running: the batch of the step that runs now; None while it is an ordinary one, or no
            step at all but a dummy run.
    """

    def __init__(
        self,
        block_size: int,
        rotations: Sequence[Rotation],
        shared_reading: bool = True,
        device: torch.device | str = "cpu",
        tile_shapes: Collection[LayerShape] = (),
    ) -> None:
        self.block_size = block_size
        self.rotations = rotations
        self.shared_reading = shared_reading
        self.device = torch.device(device)
        self.running: ChoreoBatch | None = None
        self._tile_shapes = frozenset(tile_shapes)
        self._requests: dict[str, RequestSpans] = {}
        self._block_ids: dict[str, Sequence[int]] = {}
        self._laid_out: list[RequestSpans] = []
        self._columns: dict[str, torch.Tensor] = {}
        self._own: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self._bases: torch.Tensor = torch.empty(0, dtype=torch.int32)
        self._device_bases: torch.Tensor = self._bases
        self._cos_sin: dict[Rotation, torch.Tensor] = {}
        self._reads: SharedReads | None = None
        self._tiles: dict[LayerShape, Tiles] = {}
        self._tiled_for: tuple[bool, list[int]] | None = None
        self._tiled_own: torch.Tensor = self._bases

    def update(
        self,
        started: Mapping[str, RequestSpans],
        finished: Iterable[str],
        block_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Take in what the scheduler sent with a step.

        Args:
            started: spans of the requests that start, or start again.
            finished: requests that ended.
            block_ids: of requests that start; needed where the block table lies on a device.
        """
        for request_id in finished:
            self._requests.pop(request_id, None)
            self._block_ids.pop(request_id, None)
        self._requests.update(started)
        self._block_ids.update({r: ids for r, ids in (block_ids or {}).items() if r in started})

    def reads_spans(self, request_ids: Iterable[str]) -> bool:
        """Whether any of the requests reads more than its own tokens."""
        return any(self._requests.get(r, _ORDINARY).first_slot for r in request_ids)

    def batch(
        self,
        request_ids: Sequence[str],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        device_seq_lens: torch.Tensor | None = None,
    ) -> ChoreoBatch | None:
        """The batch's spans; None if every request reads its own tokens only.

        Args:
            request_ids: of the batch, in its order.
            query_start_loc: int32 `[num_reqs + 1]`, in host memory.
            seq_lens: int32 `[num_reqs]`, tokens of the virtual sequences after this step, in host
                memory; for kernels that take tiles an upper bound will do.
            block_table: int32 `[num_reqs, max_blocks]`, on the device.
            device_seq_lens: the very lengths, on the device; needed for tiles.
        """
        if not self.reads_spans(request_ids):
            return None
        requests = [self._requests.get(request_id, _ORDINARY) for request_id in request_ids]
        # By identity: the spans of a request that starts again are a new object, and may lie in
        # other blocks.
        is_new = len(requests) != len(self._laid_out) or any(map(is_not, requests, self._laid_out))
        if is_new:
            self._lay_out(requests)
        own = seq_lens - self._bases
        num_tokens = self._columns["num_tokens"].clone()
        num_tokens[self._own] = own
        spans = SpanBatch(
            query_start_loc=query_start_loc,
            block_table=block_table,
            span_start_loc=self._columns["span_start_loc"],
            first_slot=self._columns["first_slot"],
            num_tokens=num_tokens,
            stored_position=self._columns["stored_position"],
            position_delta=self._columns["position_delta"],
            block_size=self.block_size,
        )
        if is_new:  # later steps only let the own spans grow, as vLLM lets its sequences
            spans.validate()
            is_host = block_table.device.type == "cpu"
            table = block_table if is_host else self._sent_table(request_ids)
            self._reads = plan_shared_reads(dataclasses.replace(spans, block_table=table))
        reads = self._reads if self.shared_reading else None
        if self._tile_shapes:
            self._cut(spans, reads, own, is_new)
            assert device_seq_lens is not None
            own_tokens = device_seq_lens - self._device_bases
        tiles = {shape: t.with_own_tokens(own_tokens) for shape, t in self._tiles.items()}
        return ChoreoBatch(spans, self._cos_sin, reads, tiles)

    def _lay_out(self, requests: list[RequestSpans]) -> None:
        """Flatten the spans; each request's own span comes last and is not rotated."""
        with_own = [
            dataclasses.replace(
                request,
                first_slot=(*request.first_slot, request.base),
                num_tokens=(*request.num_tokens, 0),
                stored_position=(*request.stored_position, request.base),
                position_delta=(*request.position_delta, 0),
            )
            for request in requests
        ]
        ends = list(accumulate(len(request.first_slot) for request in with_own))
        self._columns = {
            name: _int32([x for request in with_own for x in getattr(request, name)])
            for name in ("first_slot", "num_tokens", "stored_position", "position_delta")
        }
        self._columns["span_start_loc"] = _int32([0, *ends])
        self._own = torch.tensor(ends, dtype=torch.int64) - 1
        self._bases = _int32([request.base for request in requests])
        self._device_bases = to_device(self._bases, self.device)
        deltas = self._columns["position_delta"]
        self._cos_sin = {
            rotation: to_device(rotation.cos_sin(deltas), self.device)
            for rotation in self.rotations
        }
        self._laid_out = requests

    def _sent_table(self, request_ids: Sequence[str]) -> torch.Tensor:
        """The block table in host memory, as far as the scheduler sent it when requests started.

        What requests got since then holds own tokens only, which planning does not look up.
        """
        rows = [_int32(self._block_ids.get(request_id, ())) for request_id in request_ids]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _cut(
        self, spans: SpanBatch, reads: SharedReads | None, own: torch.Tensor, is_new: bool
    ) -> None:
        """Cut the work into tiles, where those of the last step do not serve.

        They hold for the same queries; own spans that grow leave the shares of the work uneven.
        """
        tiled_for = (reads is None, spans.query_start_loc.tolist())
        is_same = not is_new and tiled_for == self._tiled_for
        if is_same and not bool((own > 2 * self._tiled_own.clamp(min=MIN_SPLIT_TOKENS)).any()):
            return
        from vllm_choreo.ops.triton import make_tiles

        self._tiles = {
            shape: make_tiles(spans, reads, device=self.device, **shape._asdict())
            for shape in self._tile_shapes
        }
        self._tiled_for, self._tiled_own = tiled_for, own


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, without waiting for what runs there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
