# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operations: random caches, and batches of requests that read shared messages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    Rotation,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    span_attention,
)
from vllm_choreo.ops.flash_prefills import (
    FlashPrefills,
    first_prefill,
    plan_prefills,
    prefill_row_bytes,
)
from vllm_choreo.ops.sharing import PARTIAL_BYTES, SharedReads
from vllm_choreo.ops.tiles import Tiles


@dataclass(frozen=True)
class Heads:
    """Of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"


@dataclass(frozen=True)
class Work:
    """What the requests of a batch do.

    Attributes:
        num_reqs: requests, all of this form.
        q_len: queries of each: 1 is decode.
        shared_tokens: that all of them read, each in an order of its own.
        num_spans: messages that they lie in.
        own_tokens: of each request before this step.
        private_tokens: of a message that only this request reads.
        sub_spans: every other request begins in the middle of its messages.
    """

    num_reqs: int
    q_len: int
    shared_tokens: int
    num_spans: int
    own_tokens: int
    private_tokens: int = 0
    sub_spans: bool = False


@dataclass(frozen=True)
class Kind:
    """How a layer attends, and how its cache lies.

    Attributes:
        rotary_dim: leading dims that rotate; 0 for none.
        layout: "NHD" or "HND": whether slots or heads lie further apart in a block.
    """

    heads: Heads
    dtype: torch.dtype = torch.bfloat16
    rotary_dim: int = 0
    is_neox: bool = True
    softcap: float = 0.0
    alibi: bool = False
    layout: str = "NHD"
    block_size: int = 16

    def rotation(self) -> Rotation:
        dims = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64)
        return Rotation(10000.0 ** (-dims / max(self.rotary_dim, 1)), self.is_neox)


def make_cache(num_blocks: int, kind: Kind, device: torch.device) -> torch.Tensor:
    """``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, random, side by side."""
    heads, size = kind.heads.num_kv_heads, kind.block_size
    inner = (size, heads) if kind.layout == "NHD" else (heads, size)
    shape = (num_blocks, *inner, 2 * kind.heads.head_size)
    cache = torch.randn(shape, dtype=kind.dtype, device=device)
    return cache.transpose(1, 2) if kind.layout == "NHD" else cache


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the arguments of `span_attention` are made of.

    The batch lies in host memory, the rest on the device.
    """

    kind: Kind
    work: Work
    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: SpanBatch
    alibi_slopes: torch.Tensor | None

    @property
    def scale(self) -> float:
        return float(self.kind.heads.head_size**-0.5)

    def reads(self) -> SharedReads | None:
        return plan_shared_reads(self.batch, min_tokens=1)  # also in a dry run

    def prefills(self) -> FlashPrefills | None:
        """Requests that FlashAttention runs; None: none is long enough.

        Raises:
            ImportError: vLLM's FlashAttention is not installed.
        """
        kind, device = self.kind, self.query.device
        heads, itemsize = kind.heads, kind.dtype.itemsize
        row_bytes = prefill_row_bytes(heads.num_heads, heads.head_size, itemsize)
        max_rows = PARTIAL_BYTES // row_bytes
        first = first_prefill(self.batch, max_rows)
        if first == self.batch.num_reqs or device.type != "cuda":
            return None
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        attention = functools.partial(
            flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=heads.head_size)
        )
        own = self.batch.num_tokens[self.batch.span_start_loc[1:].long() - 1].to(device)
        batch = dataclasses.replace(self.batch, block_table=self.batch.block_table.to(device))
        return plan_prefills(batch, first, attention, own, max_rows)

    def tiles(self, reads: SharedReads | None) -> Tiles:
        # Only here: Triton decides on import whether it compiles or interprets.
        from vllm_choreo.ops.triton import make_tiles

        return make_tiles(
            self.batch, reads, **dataclasses.asdict(self.kind.heads),
            dtype=self.query.dtype, device=self.query.device,
        )  # fmt: skip

    def ours(
        self,
        output: torch.Tensor,
        reads: SharedReads | None,
        tiles: Tiles | None = None,
        prefills: FlashPrefills | None = None,
    ) -> Callable[[], None]:
        """A call of the Triton kernels, planned already."""
        if prefills is not None:
            rest = dataclasses.replace(self, batch=prefills.rest_of(self.batch))
            tiles = rest.tiles(reads)
        tiles = tiles or self.tiles(reads)
        device = self.query.device
        table = self.batch.block_table.to(device)
        batch = dataclasses.replace(self.batch, block_table=table)
        rotation = self.kind.rotation()
        cos_sin = rotation.cos_sin(self.batch.position_delta).to(device)
        cos_sin = cos_sin if self.kind.rotary_dim else None
        plan = SpanPlan(batch, cos_sin, reads, tiles, prefills=prefills)
        layer = LayerAttention(
            self.scale, self.kind.is_neox, self.kind.softcap, self.alibi_slopes,
            layout=Layout.SIDE_BY_SIDE,
        )  # fmt: skip

        def call() -> None:
            span_attention(self.query, self.kv_cache, output, plan, layer, impl="triton")

        return call


def make_inputs(kind: Kind, work: Work, seed: int, device: torch.device) -> Inputs:
    torch.manual_seed(seed)
    batch, num_blocks = _Layout(kind.block_size, random.Random(seed)).batch(work)
    batch.validate(num_blocks)
    shape = (work.num_reqs * work.q_len, kind.heads.num_heads, kind.heads.head_size)
    slopes = 0.1 * torch.rand(kind.heads.num_heads, device=device) if kind.alibi else None
    return Inputs(
        kind=kind,
        work=work,
        query=torch.randn(shape, device=device).to(kind.dtype),
        kv_cache=make_cache(num_blocks, kind, device),
        batch=batch,
        alibi_slopes=slopes,
    )


@dataclass(frozen=True)
class _Message:
    first_block: int
    num_tokens: int
    position: int


class _Layout:
    """Places messages in blocks and requests over them."""

    def __init__(self, block_size: int, rng: random.Random) -> None:
        self.block_size = block_size
        self.rng = rng
        self.num_blocks = 0

    def message(self, num_tokens: int) -> _Message:
        first = self.num_blocks
        self.num_blocks += -(-num_tokens // self.block_size)
        return _Message(first, num_tokens, self.rng.randrange(4000))

    def batch(self, work: Work) -> tuple[SpanBatch, int]:
        """The batch, and the number of blocks that its cache needs."""
        shared = [self.message(size) for size in _parts(work.shared_tokens, work.num_spans)]
        rows: list[list[int]] = []
        spans: list[tuple[int, int, int, int]] = []
        span_start = [0]
        for r in range(work.num_reqs):
            parents = shared[r % max(len(shared), 1) :] + shared[: r % max(len(shared), 1)]
            if work.private_tokens:
                parents = [*parents, self.message(work.private_tokens)]
            skipped = self.block_size + 3 if work.sub_spans and r % 2 else 0
            row: list[int] = []
            seen = 0
            for parent in parents:
                skip = skipped if parent.num_tokens > skipped else 0
                size = parent.num_tokens - skip
                stored = parent.position + skip
                spans.append((len(row) * self.block_size + skip, size, stored, stored - seen))
                row += self._blocks(parent)
                seen += size
            own = self.message(work.own_tokens + work.q_len)
            spans.append((len(row) * self.block_size, own.num_tokens, seen, 0))
            rows.append(row + self._blocks(own))
            span_start.append(len(spans))
        return self._batch(work, rows, span_start, spans), self.num_blocks

    def _blocks(self, message: _Message) -> list[int]:
        count = -(-message.num_tokens // self.block_size)
        return list(range(message.first_block, message.first_block + count))

    def _batch(
        self,
        work: Work,
        rows: list[list[int]],
        span_start: list[int],
        spans: list[tuple[int, int, int, int]],
    ) -> SpanBatch:
        # Blocks lie anywhere in the cache, as after a while of serving.
        places = list(range(self.num_blocks))
        self.rng.shuffle(places)
        # As wide as an engine's table is: one and the same kernel for all widths.
        width = -(-max(map(len, rows)) // 16) * 16
        table = [[places[block] for block in row] + [0] * (width - len(row)) for row in rows]
        first_slot, num_tokens, stored, delta = (_ints(list(c)) for c in zip(*spans, strict=True))
        starts = list(itertools.accumulate([work.q_len] * work.num_reqs, initial=0))
        return SpanBatch(
            _ints(starts), torch.tensor(table, dtype=torch.int32), _ints(span_start),
            first_slot, num_tokens, stored, delta, self.block_size,
        )  # fmt: skip


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _parts(total: int, count: int) -> list[int]:
    """`total` in `count` parts of about the same size, few of which fill whole blocks."""
    if total == 0:
        return []
    ends = [total * (i + 1) // count + (3 * i % 5 if i + 1 < count else 0) for i in range(count)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]
