# SPDX-License-Identifier: Apache-2.0
"""Attention over spans by xformers 0.0.35: its paged masks, its Triton split-K kernel, its merge.

To xformers every span is a sequence with keys anywhere in pages ("gappy"); queries are copied once
per span that they read, rotated for it. What the spans of a request found is merged by log-sum-exp.
Keys and values are read where they lie.

A second opinion, written by others, and not for serving: the kernel is compiled anew for every
number of spans and tokens, and nothing is read together. It is called without xformers' own checks,
which refuse it wherever xformers' C++ library, built for one version of torch, does not load; the
kernel does without that library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch
import triton
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
from xformers.ops.fmha.triton_splitk import FwOp

from vllm_choreo.ops.layout import Layout, key_view, value_view
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.spans import SpanBatch, ints

HEAD_SIZES = (16, 32, 64, 128, 256, 512)
# Of the kernel: a causal sequence has no more queries, and all of a launch have as many.
_MAX_CAUSAL_QUERIES = 16
# Keys that the kernel takes at once; a block must hold a multiple.
_MIN_CHUNK, _MAX_CHUNK = 16, 64

if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    raise ImportError(
        f"xformers' kernel needs block pointers, which Triton {triton.__version__} no longer has; "
        "install triton==3.7.1, the version that torch 2.13.0 names"
    )


@dataclass(frozen=True)
class Reader:
    """Some consecutive queries of a request, and the tokens of a span that they read.

    Attributes:
        column: 0 for the own span, from 1 on for the request's parents.
        first_query: index in the batch of the first query.
        num_tokens: tokens that are read of the span; of an own span those up to the last query.
        first_token: first token that is read of the span, 0 but in windows.
    """

    request: int
    span: int
    column: int
    first_query: int
    num_queries: int
    num_tokens: int
    first_token: int = 0


@dataclass(frozen=True)
class Launch:
    """Readers that the kernel serves together.

    If causal, the last query reads all tokens, the one before it all but one, and so on.
    """

    readers: Sequence[Reader]
    is_causal: bool

    def bias(self, batch: SpanBatch, pages_per_block: int = 1) -> PagedBlockDiagonalGappyKeysMask:
        """Mask of xformers for the tokens that readers see, on the device of the block table.

        Its `materialize((num_queries, num_readers * slots of a row))` is 0 where attended, `-inf`
        elsewhere, over the slots of all blocks; a block must then occur once in a row.

        Args:
            pages_per_block: factor of page numbers: block `b` is page `b * pages_per_block`.
        """
        kinds = (BlockDiagonalGappyKeysMask, PagedBlockDiagonalGappyKeysMask)
        if self.is_causal:
            kinds = (
                BlockDiagonalCausalWithOffsetGappyKeysMask,
                PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
            )
        flat, paged = kinds
        first_slot, table = ints(batch.first_slot), batch.block_table
        row = table.shape[1] * batch.block_size
        # Made flat, then paged: in 0.0.35 no arguments satisfy the paged masks' own from_seqlens.
        starts = [i * row + first_slot[r.span] + r.first_token for i, r in enumerate(self.readers)]
        mask = flat.from_seqlens(
            [r.num_queries for r in self.readers],
            [*starts, len(self.readers) * row],
            [r.num_tokens for r in self.readers],
            device=table.device,
        )
        requests = torch.tensor([r.request for r in self.readers], device=table.device)
        pages = table[requests] * pages_per_block
        return mask.make_paged(pages, batch.block_size, row, paged)


def plan_launches(batch: SpanBatch, window: int | None = None) -> list[Launch]:
    """Plan launches that take every query of the batch to every span of its request.

    Parents, and own spans of single queries, are one launch; other own spans are cut into
    sequences as short as the kernel takes, one launch for each length. In a window every query
    reads for itself.
    """
    if window is not None:
        return [Launch(list(_near(batch, window)), is_causal=False)]
    query_start, span_start = ints(batch.query_start_loc), ints(batch.span_start_loc)
    num_tokens = ints(batch.num_tokens)
    by_causal_queries: dict[int, list[Reader]] = {}
    for r in range(batch.num_reqs):
        first, end = query_start[r : r + 2]
        own = span_start[r + 1] - 1
        for column, j in enumerate(range(span_start[r], own), start=1):
            if end > first:
                reader = Reader(r, j, column, first, end - first, num_tokens[j])
                by_causal_queries.setdefault(1, []).append(reader)
        for begin in range(first, end, _MAX_CAUSAL_QUERIES):
            stop = min(begin + _MAX_CAUSAL_QUERIES, end)
            reader = Reader(r, own, 0, begin, stop - begin, num_tokens[own] - (end - stop))
            by_causal_queries.setdefault(stop - begin, []).append(reader)
    return [Launch(readers, queries > 1) for queries, readers in by_causal_queries.items()]


def _near(batch: SpanBatch, window: int) -> Iterator[Reader]:
    """Readers of single queries, each with the tokens of a span inside its window."""
    query_start, span_start = ints(batch.query_start_loc), ints(batch.span_start_loc)
    num_tokens, seen = ints(batch.num_tokens), ints(batch.stored_position - batch.position_delta)
    for r in range(batch.num_reqs):
        own = span_start[r + 1] - 1
        for query in range(query_start[r], query_start[r + 1]):
            index = num_tokens[own] - query_start[r + 1] + query
            for j in range(span_start[r], own + 1):
                end = index + 1 if j == own else num_tokens[j]
                first = max(0, seen[own] + index + 1 - window - seen[j])
                column = 0 if j == own else j - span_start[r] + 1
                if first < end:
                    yield Reader(r, j, column, query, 1, end - first, first)


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Run ``vllm_choreo.ops.span_attention``.

    The block table and ``cos_sin`` lie on the query's device. ``reads`` and ``tiles`` only say how
    to read, and are not used: every request reads for itself, with the same result. Rotated
    queries are rounded to the query's dtype, partial results are float32. Slots before the first
    of a span, in its first block, are loaded with weight 0 and must hold finite numbers.

    Raises:
        ValueError: dtype, head size, block size, layout, soft cap, slopes or other weights that
            the kernel has no way for.
    """
    _refuse_unsupported(query, kv_cache, plan.spans, layer)
    batch, cos_sin = plan.spans, plan.cos_sin
    num_queries, num_kv_heads = int(batch.query_start_loc[-1]), kv_cache.shape[1]
    if not num_queries:
        return
    pages_per_block = kv_cache.stride(0) // (batch.block_size * kv_cache.stride(2))
    group = query.shape[1] // num_kv_heads
    keys = _paged(key_view(kv_cache, layer.layout), pages_per_block, group)
    values = _paged(value_view(kv_cache, layer.layout), pages_per_block, group)
    sinks = layer.sinks
    # A sink is a column that nobody reads: an output of zero.
    num_columns = max(ints(batch.span_start_loc.diff())) + (sinks is not None)
    shape = (num_queries, num_columns, num_kv_heads, group)
    found = query.new_zeros((*shape, query.shape[2]), dtype=torch.float32)
    lse = query.new_full(shape, -torch.inf, dtype=torch.float64)
    if sinks is not None:
        lse[:, -1] = sinks.double().view(num_kv_heads, group)
    for launch in plan_launches(batch, layer.window):
        rows, columns, spans = _rows(launch.readers, query.device)
        asked = query[rows]
        if cos_sin is not None:
            asked = _rotate(asked, cos_sin[spans], layer.is_neox)
        inputs = fmha.Inputs(
            query=asked.unflatten(1, (num_kv_heads, group))[None],
            key=keys,
            value=values,
            attn_bias=launch.bias(batch, pages_per_block),
            scale=layer.scale,
            is_partial=True,
        )
        part, context = _operator(launch, batch, num_kv_heads).apply(inputs, needs_gradient=True)
        found[rows, columns] = part.view(-1, *found.shape[2:])
        lse[rows, columns] = context.lse[0].permute(2, 0, 1)
    merged, _ = fmha.merge_attentions(
        found.transpose(0, 1)[:, None],
        lse.permute(1, 2, 3, 0)[:, None],
        write_lse=False,
        output_dtype=query.dtype,
    )
    output[:num_queries] = merged[0].flatten(1, 2)


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    layout: Layout,
    value_size: int | None = None,
) -> None:
    """Refuse to reposition keys: xformers has no such operation.

    Raises:
        ValueError: always.
    """
    raise ValueError("impl='xformers' cannot reposition keys: use impl='triton'")


def _refuse_unsupported(
    query: torch.Tensor, kv_cache: torch.Tensor, spans: SpanBatch, layer: LayerAttention
) -> None:
    """Refuse arguments that xformers' kernel has no way for.

    Raises:
        ValueError: names the argument and the way out.
    """
    block_size, head_size = kv_cache.shape[2], query.shape[2]
    reason = None
    # Triton 3.7.1's interpreter multiplies the bit patterns of bfloat16.
    is_interpreted = triton.knobs.runtime.interpret
    dtypes = (torch.float16,) if is_interpreted else (torch.float16, torch.bfloat16)
    if query.device.type == "cpu" and not is_interpreted:
        raise ValueError("query lies on the CPU; impl='xformers' runs on GPUs: use impl='cpu'")
    if query.dtype not in dtypes:
        reason = f"query is {query.dtype}, none of {dtypes}"
    elif layer.softcap:
        reason = f"softcap is {layer.softcap}, not 0"
    elif layer.alibi_slopes is not None:
        reason = "alibi_slopes are given"
    elif spans.reweighting is not None:
        reason = "some spans count by other weights"
    elif layer.layout is not Layout.SIDE_BY_SIDE:
        reason = f"layout is '{layer.layout.value}', not '{Layout.SIDE_BY_SIDE.value}'"
    elif layer.quantized is not None:
        reason = f"kv_cache holds {layer.quantized.name}"
    elif head_size not in HEAD_SIZES:
        reason = f"query has head size {head_size}, none of {HEAD_SIZES}"
    elif block_size % _MIN_CHUNK:
        reason = f"kv_cache has block size {block_size}, no multiple of {_MIN_CHUNK}"
    elif kv_cache.stride(0) % (block_size * kv_cache.stride(2)):
        reason = f"kv_cache has strides {kv_cache.stride()}, so blocks are no whole pages apart"
    if reason:
        raise ValueError(f"{reason}, for which xformers' kernel has no way: use impl='triton'")


def _paged(view: torch.Tensor, pages_per_block: int, group: int) -> torch.Tensor:
    """Keys or values as the kernel reads them, no copy: one row of slots at equal distances.

    Where the slots of other heads or layers lie between those of two blocks, they are pages
    between, which the block table passes over; heads then only differ in where the row begins.

    Args:
        view: ``[num_blocks, num_kv_heads, block_size, head_size]``.

    Returns:
        ``[1, num_slots, num_kv_heads, group, head_size]``, in which a group shares its keys.
    """
    num_blocks, num_kv_heads, block_size, head_size = view.shape
    num_slots = ((num_blocks - 1) * pages_per_block + 1) * block_size
    _, head, slot, _ = view.stride()
    return view.as_strided((1, num_slots, num_kv_heads, group, head_size), (0, slot, head, 0, 1))


def _operator(launch: Launch, batch: SpanBatch, num_kv_heads: int) -> type[FwOp]:
    """Kernel with as many splits as xformers finds good."""
    block_size = batch.block_size
    num_splits = FwOp.get_split_k(
        B=len(launch.readers),
        G=num_kv_heads,
        H=1,
        Mk=batch.block_table.shape[1] * block_size,
        Mq=max(reader.num_queries for reader in launch.readers),
        page_size=block_size,
        is_paged=True,
    )
    largest_power_of_2 = block_size & -block_size
    return FwOp.get_operator(num_splits, block_n=min(_MAX_CHUNK, largest_power_of_2))


def _rows(readers: Sequence[Reader], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows in the batch, columns and spans of the copied queries; int64 ``[num_copies]`` each."""
    rows = chain.from_iterable(range(r.first_query, r.first_query + r.num_queries) for r in readers)
    columns = chain.from_iterable(repeat(r.column, r.num_queries) for r in readers)
    spans = chain.from_iterable(repeat(r.span, r.num_queries) for r in readers)
    return tuple(torch.tensor(list(numbers), device=device) for numbers in (rows, columns, spans))


def _rotate(query: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Turn ``[n, num_heads, head_size]`` by ``cos_sin`` ``[n, rotary_dim]``, in float32."""
    turned = query.float()
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    first, second = (
        (slice(0, half), slice(half, rotary_dim))
        if is_neox
        else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    )
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    a, b = turned[..., first].clone(), turned[..., second].clone()
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned.to(query.dtype)
