# SPDX-License-Identifier: Apache-2.0
"""Launch of the attention kernels over the tiles of a batch."""

from __future__ import annotations

import functools
import math

import torch
import triton

from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.sharing import PARTIAL_BYTES, SharedReads, partial_row_bytes
from vllm_choreo.ops.spans import SpanBatch
from vllm_choreo.ops.tile_planner import plan_tiles
from vllm_choreo.ops.tiles import MIN_ROWS, Tiles
from vllm_choreo.ops.triton.kernels import attend_tiles, merge_partials
from vllm_choreo.ops.triton.tuning import arch_of, tuning_of

# What the interpreter is told to fill, so that small tests are split as well.
_PROGRAMS_ON_CPU = 16
# Ids of blocks are loaded two chunks ahead, keys and values one: the latter need the former.
_NUM_STAGES = 3
# Numbers for the kernel's FORMAT, and by what its numbers are to be multiplied.
_FORMATS = {torch.float8_e4m3fn: (1, 256.0), torch.float8_e5m2: (2, 1.0)}
# Bytes of a chunk of keys in shared memory; values take as much, for two chunks each.
_CHUNK_BYTES = 16 * 1024


@functools.cache
def _num_programs(num_rows: int, head_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Programs of tiles of so many rows that the device runs at once."""
    if device.type != "cuda":
        return _PROGRAMS_ON_CPU
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    row_bytes = _row_bytes(head_size, dtype)
    tuning = tuning_of(num_rows, row_bytes, dtype.itemsize, arch_of(device))
    return processors * tuning.num_programs


def _row_bytes(head_size: int, dtype: torch.dtype) -> int:
    """Bytes of a head of a query, padded."""
    return int(triton.next_power_of_2(head_size)) * dtype.itemsize


def _max_rows(head_size: int, dtype: torch.dtype) -> int:
    """Rows of a tile: as many as fit into any GPU from Ampere on.

    That is into its registers, and into the 99 KiB of shared memory that the smallest of them give
    a program.
    """
    row_bytes = _row_bytes(head_size, dtype)
    return 128 if row_bytes <= 128 else 64 if row_bytes <= 256 else 32


def _chunk_tokens(padded_head_size: int, dtype: torch.dtype) -> int:
    """Number of tokens that are loaded at once."""
    return max(MIN_ROWS, min(64, _CHUNK_BYTES // (padded_head_size * dtype.itemsize)))


def make_tiles(
    batch: SpanBatch,
    reads: SharedReads | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    window: int | None = None,
) -> Tiles:
    """Cut a batch, which lies in host memory, for these kernels on a device: see `plan_tiles`."""
    device = torch.device(device)
    return plan_tiles(
        batch,
        reads,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_rows=_max_rows(head_size, dtype),
        num_programs=lambda num_rows: _num_programs(num_rows, head_size, dtype, device),
        device=device,
        max_partials=PARTIAL_BYTES // partial_row_bytes(num_heads, head_size),
        window=window,
    )


def _partials(
    plan: SpanPlan, num_partials: int, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial outputs and their log-sum-exps, flat float32.

    The outputs are ``[num_partials, num_heads, value_size]``, log-sum-exps lack the last dim.
    """
    num_rows = num_partials * output.shape[1]
    sizes = (num_rows * output.shape[2], num_rows)
    workspace = plan.workspace
    # Spans that count by other weights leave partial results, however many they are.
    if workspace is None or (plan.spans.reweighting and workspace.numel() < sum(sizes)):
        workspace = output.new_empty(sum(sizes), dtype=torch.float32)
    elif workspace.numel() < sum(sizes):
        raise ValueError(
            f"workspace has {workspace.numel()} numbers, but partial results take {sum(sizes)}: "
            f"make it {PARTIAL_BYTES} bytes, or leave it out"
        )
    partial_output, lse = workspace[: sum(sizes)].split(sizes)
    return partial_output, lse


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Run ``vllm_choreo.ops.span_attention``.

    The block table, ``cos_sin``, temperatures and factors lie on the query's device; without
    ``tiles`` the rest of the plan's spans lies in host memory.
    """
    _, num_heads, head_size = query.shape
    num_kv_heads, value_size = kv_cache.shape[1], output.shape[2]
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"query is {query.dtype}; impl='triton' has kernels for float32, bfloat16 and float16"
        )
    if query.stride(2) != 1 or output.stride(2) != 1:
        raise ValueError("the last dim of query and output must be contiguous")
    tiles, table, cos_sin = plan.tiles, plan.spans.block_table, plan.cos_sin
    if tiles is None:
        tiles = make_tiles(
            plan.spans,
            plan.reads,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=query.dtype,
            device=query.device,
            window=layer.window,
        )
    weights, quantized = plan.spans.reweighting, layer.quantized
    encoding, unit = _FORMATS[quantized.dtype] if quantized else (0, 1.0)
    key_scale = quantized.key_scale * unit if quantized else 1.0
    value_scale = quantized.value_scale * unit if quantized else 1.0
    keys = key_view(kv_cache, layer.layout)
    values = value_view(kv_cache, layer.layout, layer.value_size)
    partial_output, partial_lse = _partials(plan, tiles.num_partials, output)
    padded, padded_value = map(triton.next_power_of_2, (head_size, value_size))
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    row_bytes, arch = _row_bytes(head_size, query.dtype), arch_of(query.device)
    for tile_class in tiles.classes:
        grid = (tile_class.items.shape[0] * num_kv_heads,)
        attend_tiles[grid](
            query, *query.stride()[:2],
            keys, keys.stride(1), values, values.stride(1),
            output, *output.stride()[:2], partial_output, partial_lse,
            table, table.stride(0), cos_sin, layer.alibi_slopes, layer.sinks,
            tile_class.query, tile_class.request, tile_class.column, tile_class.items,
            tiles.segments, tiles.read_span, tiles.read_position,
            tiles.own_first_slot, tiles.own_tokens, tiles.own_position, tiles.query_end,
            weights and weights.temperature, layer.scale * key_scale, layer.softcap,
            layer.window or 0, value_scale,
            BLOCK_STRIDE=keys.stride(0),
            KEY_SLOT=keys.stride(2),
            KEY_DIM=keys.stride(3),
            VALUE_SLOT=values.stride(2),
            VALUE_DIM=values.stride(3),
            NUM_ROWS=tile_class.num_rows,
            NUM_KV_HEADS=num_kv_heads,
            GROUP_HEADS=num_heads // num_kv_heads,
            HEAD_SIZE=head_size,
            PADDED_HEAD_SIZE=padded,
            VALUE_SIZE=value_size,
            PADDED_VALUE_SIZE=padded_value,
            ROTARY_OFFSET=layer.value_size or 0,
            ROTARY_DIM=rotary_dim,
            IS_NEOX=layer.is_neox,
            RUN=math.gcd(rotary_dim // 2, layer.value_size or 0, 16),
            HAS_SOFTCAP=layer.softcap > 0,
            HAS_ALIBI=layer.alibi_slopes is not None,
            HAS_WINDOW=layer.window is not None,
            HAS_SINKS=layer.sinks is not None,
            HAS_TEMPERATURE=weights is not None,
            BLOCK_SIZE=plan.spans.block_size,
            CHUNK=_chunk_tokens(padded, query.dtype),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            WIDEN=query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
            FORMAT=encoding,
            num_stages=_NUM_STAGES,
            **tuning_of(tile_class.num_rows, row_bytes, query.dtype.itemsize, arch).options(),
        )  # fmt: skip
    if tiles.num_partials:
        merge_partials[(tiles.merged_query.numel(), num_heads)](
            output, *output.stride()[:2], partial_output, partial_lse,
            tiles.merged_query, tiles.partial_start_loc, tiles.partial, layer.sinks,
            tiles.merged_request, tiles.merged_chosen, weights and weights.factor,
            VALUE_SIZE=value_size, PADDED_VALUE_SIZE=padded_value,
            HAS_SINKS=layer.sinks is not None,
            HAS_TEMPERATURE=weights is not None, num_warps=1,
        )  # fmt: skip
