# SPDX-License-Identifier: Apache-2.0
"""The spans of the batch, from the scheduler's plans to what the attention layers read.

requests of a step   SpanBatcher.batch
per group of layers      spans, grouped reads         _GroupBatcher
per kind of layer        rotation, tiles            one SpanPlan each, at LayerKind's index
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_not
from typing import NamedTuple

import numpy as np
import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.angles import Angles
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.plan_room import PlanRoom
from vllm_choreo.engine.worker.reweighting import reweighting_of
from vllm_choreo.engine.worker.tensors import int32, to_device
from vllm_choreo.engine.worker.watching import AttentionWatch
from vllm_choreo.ops import (
    Reweighting,
    Rotation,
    SharedReads,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
)
from vllm_choreo.ops.flash_prefills import (
    FlashAttention,
    FlashPrefills,
    first_prefill,
    plan_prefills,
    prefill_row_bytes,
)
from vllm_choreo.ops.ragged import bounds_of
from vllm_choreo.ops.sharing import (
    MIN_SAVED_BYTES,
    PARTIAL_BYTES,
    counted_queries,
    partial_row_bytes,
)
from vllm_choreo.ops.tiles import MIN_SPLIT_TOKENS, Tiles

_ORDINARY = RequestSpans((), (), (), (), 0)
_COLUMNS = ("first_slot", "num_tokens", "stored_position", "position_delta")
_NO_BLOCKS = int32(())
_NO_SPANS: np.ndarray = np.empty((len(_COLUMNS), 0), dtype=np.int32)


class StepBatch(NamedTuple):
    """Batch of a step, as vLLM's runner knows it.

    Attributes:
        request_ids: ids of the requests, in the order of the batch.
        query_start_loc: int32 `[num_reqs + 1]`, in host memory.
        seq_lens: int32 `[num_reqs]`, tokens of the virtual sequences after this step, in host
            memory; for kernels that take tiles an upper bound will do.
        block_table: int32 `[num_reqs, max_blocks]`, on the device.
        device_seq_lens: the very lengths, on the device; needed for tiles.
        other_tables: block tables of the KV cache groups whose layers have others, by number.
        graph_requests: requests of the full CUDA graph that the step replays, rows of padding
            included; None: layers are launched, or piecewise graphs replayed.
    """

    request_ids: Sequence[str]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    device_seq_lens: torch.Tensor | None = None
    other_tables: Mapping[int, torch.Tensor] = {}
    graph_requests: int | None = None

    def table_of(self, group: int) -> torch.Tensor:
        """Block table of the layers of a group."""
        return self.other_tables.get(group, self.block_table)


class SpanBatcher:
    """Spans of running requests, laid out for a batch.

    Between two steps of the same requests only the own spans grow, so the rest is kept: laying
    out, grouping, rotating and cutting cost nothing in a decode step. Nothing here waits for a
    device.

    Args:
        block_size: tokens in a KV block.
        kinds: kinds of the model's layers, each once.
        shared_reading: see the attribute.
        device: device of the KV cache.
        is_tiled: True if the layers' kernels take tiles (`impl="triton"`).
        workspace: see `SpanPlan`.

    Attributes:
        shared_reading: True if tokens that several requests attend to are read once for all of
            them. May be set between two steps.
        min_saved_bytes: keys and values of a layer that this must save in a step. May be set, too.
        flash_attention: kernel that runs long prefills, of all kinds; None: they are cut into tiles
            like the rest. May be set, too.
        running: the plans of the step that runs now, one per kind; None while it is an ordinary
            one, or no step at all but a dummy run.
        watch: observer of the layers' queries, which sums up attention; None: there is none.
    """

    def __init__(
        self,
        block_size: int,
        kinds: Sequence[LayerKind],
        shared_reading: bool = True,
        device: torch.device | str = "cpu",
        is_tiled: bool = False,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.block_size = block_size
        self.kinds = tuple(kinds)
        self.shared_reading = shared_reading
        self.device = torch.device(device)
        self.flash_attention: FlashAttention | None = None
        self.min_saved_bytes = MIN_SAVED_BYTES if self.device.type == "cuda" else 0
        self.running: Sequence[SpanPlan] | None = None
        self.watch: AttentionWatch | None = None
        self._requests: dict[str, RequestSpans] = {}
        self._block_ids: dict[str, Sequence[torch.Tensor]] = {}  # by KV cache group
        self._laid_out: list[RequestSpans] = []
        self._reads_spans = False  # those that are laid out
        self._groups = [
            _GroupBatcher(self, group, is_tiled, workspace)
            for group in dict.fromkeys(kind.group for kind in self.kinds)
        ]

    def update(
        self,
        started: Mapping[str, RequestSpans],
        finished: Iterable[str],
        block_ids: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Take in what the scheduler sent with a step.

        Args:
            started: spans of the requests that start, or start again.
            finished: requests that ended.
            block_ids: block ids of requests that start, of each KV cache group; needed where the
                block table lies on a device.
        """
        for request_id in finished:
            self._requests.pop(request_id, None)
            self._block_ids.pop(request_id, None)
        self._requests.update(started)
        for request_id, groups in (block_ids or {}).items():
            if request_id in started:
                self._block_ids[request_id] = tuple(map(int32, groups))

    def reads_spans(self, request_ids: Iterable[str]) -> bool:
        """Return whether a request reads more than its own tokens, or has them elsewhere."""
        found = (self._requests.get(request_id, _ORDINARY) for request_id in request_ids)
        return not all(spans.is_ordinary for spans in found)

    def are_calls(self, request_ids: Iterable[str]) -> list[bool]:
        """Return, of each request, whether it is a call, or one of ours."""
        return [request_id in self._requests for request_id in request_ids]

    def make_room(self, num_requests: int) -> None:
        """Make room, at fixed addresses, for plans of steps that replay full CUDA graphs.

        Args:
            num_requests: the most that such a step has, one query each.
        """
        for group in self._groups:
            group.make_room(num_requests)

    def fits_room(self, request_ids: Collection[str]) -> bool:
        """Return whether there is room for the spans of requests that have one query each."""
        requests = [self._requests.get(request_id, _ORDINARY) for request_id in request_ids]
        return all(group.fits_room(requests) for group in self._groups)

    def room_plans(
        self, num_requests: int, tables: Mapping[int, torch.Tensor]
    ) -> Sequence[SpanPlan]:
        """Plans from which a CUDA graph of so many requests reads, one per kind.

        Args:
            tables: block tables by KV cache group, as `StepBatch` has them.
        """
        plans: dict[int, SpanPlan] = {}
        for group in self._groups:
            assert group.room is not None
            plans.update(group.room.plans(num_requests, tables[group.group]))
        return [plans[index] for index in range(len(self.kinds))]

    def batch(self, step: StepBatch, always: bool = False) -> list[SpanPlan] | None:
        """Plan a batch, once per kind; None if every request reads its own tokens only.

        Args:
            step: the batch.
            always: True to plan such a batch, too.
        """
        requests = [self._requests.get(request_id, _ORDINARY) for request_id in step.request_ids]
        # By identity: the spans of a request that starts again are a new object, and may lie in
        # other blocks.
        is_new = len(requests) != len(self._laid_out) or any(map(is_not, requests, self._laid_out))
        if is_new:
            reads_spans = not all(spans.is_ordinary for spans in requests)
            if not (always or reads_spans):
                return None
            for group in self._groups:
                group.lay_out(requests)
            self._laid_out, self._reads_spans = requests, reads_spans
        elif not (always or self._reads_spans):
            return None
        plans: dict[int, SpanPlan] = {}
        for group in self._groups:
            plans.update(group.batch(step, is_new))
        return [plans[index] for index in range(len(self.kinds))]

    def place(self, step: StepBatch, positions: torch.Tensor, back: bool = False) -> None:
        """Give the model the positions at which own tokens are stored, in place.

        Args:
            step: the batch.
            positions: int `[..., num_tokens]`, on the device: the virtual indices.
            back: True to make the positions virtual indices again.
        """
        shifts = self.shifts(step)
        if shifts is not None:
            positions[..., : len(shifts)] += -shifts if back else shifts

    def shifts(self, step: StepBatch) -> torch.Tensor | None:
        """By token, what is added to its virtual index to get its position; None: nothing.

        Returns:
            int64 `[num_tokens]`, on the device.
        """
        shifts = [self._requests.get(r, _ORDINARY).shift for r in step.request_ids]
        if not any(shifts):
            return None
        by_token = torch.tensor(shifts).repeat_interleave(step.query_start_loc.diff())
        return to_device(by_token, self.device)

    def host_table(self, step: StepBatch, group: int) -> torch.Tensor:
        """Block table of a group in host memory, as far as planning looks it up."""
        table = step.table_of(group)
        return table if table.device.type == "cpu" else self._sent_table(step.request_ids, group)

    def _sent_table(self, request_ids: Sequence[str], group: int) -> torch.Tensor:
        """Block table in host memory, as far as the scheduler sent it when requests started.

        Later blocks of requests hold own tokens only, which planning does not look up.
        """
        sent = [self._block_ids.get(request_id, (_NO_BLOCKS,)) for request_id in request_ids]
        rows = [groups[group if len(groups) > 1 else 0] for groups in sent]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class _Columns(NamedTuple):
    """Spans of a request, and an int32 array of them, `[4, num_spans + 1]`: `_COLUMNS`.

    It holds the spans, so that no others come to have their `id`.
    """

    spans: RequestSpans
    columns: np.ndarray

    @classmethod
    def of(cls, spans: RequestSpans) -> _Columns:
        """Columns of parents, and of the own span behind them, which has no tokens yet."""
        own = (spans.base, 0, spans.base + spans.shift, 0)
        rows = [(*getattr(spans, name), last) for name, last in zip(_COLUMNS, own, strict=True)]
        return cls(spans, np.array(rows, dtype=np.int32))


class _CutFor:
    """Batch for which tiles were cut last, which says how long they serve.

    They hold for the same queries; own spans that grow leave the shares of the work uneven.
    """

    def __init__(self) -> None:
        self._known: tuple[object, SharedReads | None, bytes] = (None, None, b"")
        self._most_own: np.ndarray = np.empty(0, dtype=np.int32)  # up to which the tiles serve

    def renew(
        self, columns: object, reads: SharedReads | None, queries: bytes, own: np.ndarray
    ) -> bool:
        """Remember a batch; return whether tiles must be cut for it.

        Args:
            columns: columns of the spans, by identity.
            queries: bytes of the spans' `query_start_loc`.
            own: int `[num_reqs]`, own tokens.
        """
        known_columns, known_reads, known_queries = self._known
        is_same = known_columns is columns and known_reads is reads and known_queries == queries
        if is_same and not bool((own > self._most_own).any()):
            return False
        self._known = (columns, reads, queries)
        self._most_own = 2 * np.maximum(own, MIN_SPLIT_TOKENS)
        return True


class _GroupBatcher:
    """Part of a `SpanBatcher` for the layers of one group."""

    def __init__(
        self,
        batcher: SpanBatcher,
        group: int,
        is_tiled: bool,
        workspace: torch.Tensor | None,
    ) -> None:
        self.batcher = batcher
        self.group = group
        self.device = batcher.device
        self.is_tiled = is_tiled
        self.workspace = workspace
        self._kinds = {i: kind for i, kind in enumerate(batcher.kinds) if kind.group == group}
        self._shapes = {kind.shape for kind in self._kinds.values()}
        self._max_partials = min(
            PARTIAL_BYTES // partial_row_bytes(shape.num_heads, shape.head_size)
            for shape in self._shapes
        )
        self._max_rows = min(
            PARTIAL_BYTES
            // prefill_row_bytes(shape.num_heads, shape.head_size, shape.dtype.itemsize)
            for shape in self._shapes
        )
        self._token_bytes = max(kind.token_bytes for kind in self._kinds.values())
        self._known: dict[int, _Columns] = {}  # of what is laid out, by the spans' `id`
        self._columns: dict[str, torch.Tensor] = {}
        self._reweighting: Reweighting | None = None
        self._own: np.ndarray = np.empty(0, dtype=np.int64)
        self._bases: torch.Tensor = torch.empty(0, dtype=torch.int32)
        self._device_bases: torch.Tensor = self._bases
        self._angles = {
            kind.rotation: kind.rotation and Angles(kind.rotation, self.device)
            for kind in self._kinds.values()
        }
        self._cos_sin: dict[Rotation | None, torch.Tensor | None] = {}
        self._reads: SharedReads | None = None
        self._reads_for: np.ndarray = np.empty(0, dtype=np.int32)  # `counted_queries`
        self._reads_queries: bytes | None = None  # None: the spans were laid out since
        self._tiles: dict[LayerShape, Tiles] = {}
        self._tiled_for, self._room_for = _CutFor(), _CutFor()
        self.room: PlanRoom | None = None

    def make_room(self, num_requests: int) -> None:
        """Make room for plans of full CUDA graphs."""
        batcher, is_shared = self.batcher, self.batcher.shared_reading
        self.room = PlanRoom(
            *(self._kinds, num_requests, batcher.block_size),
            *(is_shared, self.device, self.workspace),
        )

    def fits_room(self, requests: Sequence[RequestSpans]) -> bool:
        """Return whether there is room for the spans of requests."""
        if self.room is None or len(requests) > self.room.num_requests:
            return False
        of_group = [request.of_group(self.group) for request in requests]
        num_spans = sum(len(spans.first_slot) + 1 for spans in of_group)
        # Those that count by other weights leave partial results, however many they are.
        return num_spans <= self.room.num_spans and all(s.weights is None for s in of_group)

    def lay_out(self, requests: Sequence[RequestSpans]) -> None:
        """Flatten the spans; each request's own span comes last and is not rotated."""
        of_group = [request.of_group(self.group) for request in requests]
        known, self._known = self._known, {}
        for spans in of_group:
            self._known[id(spans)] = known.get(id(spans)) or _Columns.of(spans)
        columns = [self._known[id(spans)].columns for spans in of_group]
        flat = torch.from_numpy(np.concatenate([_NO_SPANS, *columns], axis=1))
        starts = bounds_of(np.array([one.shape[1] for one in columns], dtype=np.int64))
        self._columns = dict(zip(_COLUMNS, flat, strict=True))
        self._columns["span_start_loc"] = torch.from_numpy(starts.astype(np.int32))
        self._own = starts[1:] - 1
        self._reads_queries = None
        self._reweighting = reweighting_of(of_group, self.device)
        self._bases = int32([spans.base for spans in of_group])
        self._device_bases = to_device(self._bases, self.device)
        deltas = self._columns["position_delta"]
        self._cos_sin = {
            rotation: angles and angles.of(deltas) for rotation, angles in self._angles.items()
        }

    def batch(self, step: StepBatch, is_new: bool) -> dict[int, SpanPlan]:
        """Plan a batch for the group's kinds; returns the plans by the kinds' indices.

        Args:
            step: batch of the requests that were laid out last.
            is_new: False if, since the step before, only the own spans have grown, as vLLM's
                sequences do.
        """
        own = step.seq_lens.numpy() - self._bases.numpy()
        num_tokens = self._columns["num_tokens"].clone()
        num_tokens.numpy()[self._own] = own
        spans = SpanBatch(
            query_start_loc=step.query_start_loc,
            block_table=step.table_of(self.group),
            block_size=self.batcher.block_size,
            **{**self._columns, "num_tokens": num_tokens},
            reweighting=self._reweighting,
        )
        if is_new:
            spans.validate()
        is_planned = self.batcher.shared_reading or self._reweighting is not None
        queries = step.query_start_loc.numpy().tobytes()
        reads = self._reads_of(step, spans, queries) if is_planned else None
        if step.graph_requests is not None:
            return self._fill_room(step, spans, reads, own, queries)
        prefills = self._prefills_of(step, spans)
        rest = spans if prefills is None else prefills.rest_of(spans)
        tiles = self._tiles_of(step, rest, reads, own) if self.is_tiled else {}
        return {
            index: SpanPlan(
                *(spans, self._cos_sin[kind.rotation], reads),
                *(tiles.get(kind.shape), self.workspace, prefills),
            )
            for index, kind in self._kinds.items()
        }

    def _prefills_of(self, step: StepBatch, spans: SpanBatch) -> FlashPrefills | None:
        """Requests of the batch that FlashAttention runs."""
        attention = self.batcher.flash_attention
        if attention is None or (first := first_prefill(spans, self._max_rows)) == spans.num_reqs:
            return None
        assert step.device_seq_lens is not None
        own_tokens = step.device_seq_lens - self._device_bases
        return plan_prefills(spans, first, attention, own_tokens, self._max_rows)

    def _reads_of(self, step: StepBatch, spans: SpanBatch, queries: bytes) -> SharedReads | None:
        """Groups of shared reads; planned anew where a request begins to decode, too.

        Args:
            queries: bytes of the spans' `query_start_loc`.
        """
        if queries == self._reads_queries:
            return self._reads
        counts = counted_queries(spans.query_start_loc)
        if self._reads_queries is None or not np.array_equal(counts, self._reads_for):
            table = self.batcher.host_table(step, self.group)
            in_host = dataclasses.replace(spans, block_table=table)
            min_saved = self.batcher.min_saved_bytes // self._token_bytes
            self._reads = plan_shared_reads(in_host, self._max_partials, min_saved=min_saved)
            self._reads_for = counts
        self._reads_queries = queries
        return self._reads

    def _tiles_of(
        self,
        step: StepBatch,
        spans: SpanBatch,
        reads: SharedReads | None,
        own: np.ndarray,
    ) -> dict[LayerShape, Tiles]:
        """Tiles of each shape of a layer, cut anew where the last step's do not serve."""
        queries = spans.query_start_loc.numpy().tobytes()  # of which prefills may be taken out
        if self._tiled_for.renew(self._columns, reads, queries, own):
            from vllm_choreo.ops.triton import make_tiles

            self._tiles = {
                shape: make_tiles(spans, reads, device=self.device, **shape._asdict())
                for shape in self._shapes
            }
        assert step.device_seq_lens is not None
        own_tokens = step.device_seq_lens - self._device_bases
        return {shape: tiles.with_own_tokens(own_tokens) for shape, tiles in self._tiles.items()}

    def _fill_room(
        self,
        step: StepBatch,
        spans: SpanBatch,
        reads: SharedReads | None,
        own: np.ndarray,
        queries: bytes,
    ) -> dict[int, SpanPlan]:
        """Have the graph that the step replays read its spans."""
        assert self.room is not None and step.graph_requests is not None
        if self._room_for.renew(self._columns, reads, queries, own):
            self.room.fill(step.graph_requests, spans, reads, self._cos_sin)
        assert step.device_seq_lens is not None
        self.room.set_own_tokens(step.device_seq_lens, self._device_bases)
        return self.room.plans(step.graph_requests, spans.block_table)
