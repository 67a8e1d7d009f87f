# SPDX-License-Identifier: Apache-2.0
"""Launch of the attention kernels over the tiles of a batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NotRequired, TypedDict, Unpack

import torch
import triton

from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.sharing import PARTIAL_BYTES, SharedReads, partial_row_bytes
from vllm_choreo.ops.spans import SpanBatch
from vllm_choreo.ops.tile_planner import CutSizes, cut_tiles
from vllm_choreo.ops.tile_queries import tile_sizes
from vllm_choreo.ops.tile_room import TileRoom
from vllm_choreo.ops.tiles import MIN_ROWS, TileClass, Tiles
from vllm_choreo.ops.triton.kernels import attend_tiles, merge_partials
from vllm_choreo.ops.triton.launches import KernelLaunch, LayerLaunches, Moving
from vllm_choreo.ops.triton.prefills import attend_prefills
from vllm_choreo.ops.triton.tuning import arch_of, tuning_of

# What the interpreter is told to fill, so that small tests are split as well.
_PROGRAMS_ON_CPU = 16
# Ids of blocks are loaded two chunks ahead, keys and values one: the latter need the former.
_NUM_STAGES = 3
# Numbers for the kernel's FORMAT, and by what its numbers are to be multiplied.
_FORMATS = {torch.float8_e4m3fn: (1, 256.0), torch.float8_e5m2: (2, 1.0)}
# Bytes of a chunk of keys in shared memory; values take as much, for two chunks each.
_CHUNK_BYTES = 16 * 1024
# Which arguments of a kernel are those of `Moving`.
_ATTEND_PLACES = {
    0: "query", 3: "keys", 5: "values", 7: "output", 12: "table", 15: "slopes", 16: "sinks",
    25: "own_tokens",
}  # fmt: skip
_MERGE_PLACES = {0: "output", 8: "sinks"}


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


def _num_head_groups(num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """KV heads as the kernels see them.

    Where all query heads read one, as with MLA, and are more than a tile has rows, it counts
    several times: each group of query heads reads it by itself.
    """
    most = _max_rows(head_size, dtype)
    if num_kv_heads > 1:
        return num_kv_heads
    parts = range(1, num_heads // MIN_ROWS + 1)
    return next((n for n in parts if num_heads % n == 0 and num_heads // n <= most), 1)


def _chunk_tokens(padded_size: int, is_latent: bool, dtype: torch.dtype) -> int:
    """Number of tokens that are loaded at once.

    Args:
        padded_size: numbers of a key, in a latent cache of a value, padded.
        is_latent: whether values are parts of keys, which are loaded as such alone.
    """
    num_bytes = 2 * _CHUNK_BYTES if is_latent else _CHUNK_BYTES
    return max(MIN_ROWS, min(64, num_bytes // (padded_size * dtype.itemsize)))


class LayerSizes(TypedDict):
    """Sizes of a layer, and the device on which it runs.

    Attributes:
        num_heads, num_kv_heads, head_size: heads of queries and of keys, and numbers of a head.
        dtype: dtype of queries.
        window: see ``LayerAttention``.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device | str
    window: NotRequired[int | None]


def make_tiles(batch: SpanBatch, reads: SharedReads | None, **sizes: Unpack[LayerSizes]) -> Tiles:
    """Cut a batch, which lies in host memory, for these kernels on a device: see `plan_tiles`."""
    most = PARTIAL_BYTES // partial_row_bytes(sizes["num_heads"], sizes["head_size"])
    plan = cut_tiles(batch, reads, lambda plan: plan.num_partials <= most, **_cut_sizes(sizes))
    return plan.to(sizes["device"])


def make_room(
    num_requests: int, num_spans: int, is_shared: bool, **sizes: Unpack[LayerSizes]
) -> TileRoom:
    """Make room for plans of layers of these sizes, see `TileRoom`.

    Args:
        is_shared: whether requests may read together, in tiles of any size.
    """
    cut = _cut_sizes(sizes)
    group_heads = cut["num_heads"] // cut["num_kv_heads"]
    rows_of_tiles = tile_sizes(group_heads, cut["max_rows"])
    return TileRoom(
        num_requests,
        num_spans,
        {
            rows: cut["num_programs"](rows) // cut["num_kv_heads"]
            for rows in (rows_of_tiles if is_shared else rows_of_tiles[:1])
        },
        group_heads,
        PARTIAL_BYTES // partial_row_bytes(sizes["num_heads"], sizes["head_size"]),
        sizes["device"],
    )


def fill_room(
    room: TileRoom,
    num_requests: int,
    batch: SpanBatch,
    reads: SharedReads | None,
    **sizes: Unpack[LayerSizes],
) -> None:
    """Cut a batch as `make_tiles` does into a room, for graphs of so many requests.

    Raises:
        ValueError: the batch has more requests or spans than there is room for.
    """
    plan = cut_tiles(batch, reads, lambda plan: room.fits(plan, num_requests), **_cut_sizes(sizes))
    if not room.fits(plan, num_requests):
        raise ValueError(
            f"{batch.num_reqs} requests with {batch.num_spans} spans do not fit into a room for "
            f"{num_requests} and {room.num_spans}"
        )
    room.put(plan)


def _cut_sizes(sizes: LayerSizes) -> CutSizes:
    num_heads, head_size, dtype = sizes["num_heads"], sizes["head_size"], sizes["dtype"]
    device = torch.device(sizes["device"])
    return {
        "num_heads": num_heads,
        "num_kv_heads": _num_head_groups(num_heads, sizes["num_kv_heads"], head_size, dtype),
        "max_rows": _max_rows(head_size, dtype),
        "num_programs": lambda num_rows: _num_programs(num_rows, head_size, dtype, device),
        "window": sizes.get("window"),
    }


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
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"query is {query.dtype}; impl='triton' has kernels for float32, bfloat16 and float16"
        )
    if query.stride(2) != 1 or output.stride(2) != 1:
        raise ValueError("the last dim of query and output must be contiguous")
    if len({tensor.device for tensor in (query, kv_cache, output, plan.spans.block_table)}) > 1:
        raise ValueError("query, kv_cache, output and block table lie on different devices")
    if plan.tiles is None:
        plan = dataclasses.replace(plan, tiles=_tiles_of(query, kv_cache, plan, layer))
    moving = _moving(query, kv_cache, output, plan, layer)
    launches = LayerLaunches(_launches(moving, plan, layer), moving, kv_cache)
    plan.launches[_look(query, kv_cache, output, layer)] = launches
    attend_prefills(query, kv_cache, output, plan, layer)


def launch_again(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> bool:
    """Run ``span_attention`` if it ran for the plan's tiles and a layer that looks alike.

    Returns:
        False if it did not: nothing is run then.
    """
    if plan.tiles is None:
        return False
    found: LayerLaunches | None = plan.launches.get(_look(query, kv_cache, output, layer))
    if found is None:
        return False
    if found.is_prepared:
        at = query.data_ptr(), kv_cache.data_ptr(), output.data_ptr()
        found.launch_at(*at, layer.addresses, plan.addresses)
    else:
        found.launch(_moving(query, kv_cache, output, plan, layer))
    attend_prefills(query, kv_cache, output, plan, layer)
    return True


def _look(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, layer: LayerAttention
) -> tuple[object, ...]:
    """All that launches of a step depend on, but for where tensors of a layer begin.

    Of that, how they are aligned: other kernels are compiled for other alignments.
    """
    begins = query.data_ptr() % 16, kv_cache.data_ptr() % 16, output.data_ptr() % 16
    return (
        layer.look,
        begins,
        *(query.shape, query.stride(), query.dtype, query.device),
        *(kv_cache.shape, kv_cache.stride(), kv_cache.dtype),
        *(output.shape, output.stride(), output.dtype),
    )


def _moving(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> Moving:
    assert plan.tiles is not None
    keys = key_view(kv_cache, layer.layout)
    values = value_view(kv_cache, layer.layout, layer.value_size)
    groups = _num_head_groups(query.shape[1], kv_cache.shape[1], query.shape[2], query.dtype)
    keys, values = (x.expand(-1, groups, -1, -1) for x in (keys, values))
    table, own_tokens = plan.spans.block_table, plan.tiles.own_tokens
    of_layer = layer.alibi_slopes, layer.sinks
    return Moving(query, keys, values, output, *of_layer, table, own_tokens)


def _tiles_of(
    query: torch.Tensor, kv_cache: torch.Tensor, plan: SpanPlan, layer: LayerAttention
) -> Tiles:
    _, num_heads, head_size = query.shape
    return make_tiles(
        plan.spans if plan.prefills is None else plan.prefills.rest_of(plan.spans),
        plan.reads,
        num_heads=num_heads,
        num_kv_heads=kv_cache.shape[1],
        head_size=head_size,
        dtype=query.dtype,
        device=query.device,
        window=layer.window,
    )


def _launches(moving: Moving, plan: SpanPlan, layer: LayerAttention) -> list[KernelLaunch]:
    """Launches of a step, as for its first layer."""
    query, output, tiles = moving.query, moving.output, plan.tiles
    assert tiles is not None
    partials = _partials(plan, tiles.num_partials, output)
    constants = _constants(moving, plan, layer)
    row_bytes, arch = _row_bytes(query.shape[2], query.dtype), arch_of(query.device)
    launches = []
    for tile_class in tiles.classes:
        tuning = tuning_of(tile_class.num_rows, row_bytes, query.dtype.itemsize, arch)
        launches.append(
            KernelLaunch(
                attend_tiles,
                (tile_class.items.shape[0] * moving.keys.shape[1],),
                _attend_args(moving, plan, layer, tiles, tile_class, partials),
                _ATTEND_PLACES,
                {**constants, "NUM_ROWS": tile_class.num_rows},
                {"num_stages": _NUM_STAGES, **tuning.options()},
            )
        )
    if tiles.num_partials:
        launches.append(_merge(moving, plan, layer, tiles, partials))
    return launches


def _attend_args(
    moving: Moving,
    plan: SpanPlan,
    layer: LayerAttention,
    tiles: Tiles,
    tile_class: TileClass,
    partials: tuple[torch.Tensor, torch.Tensor],
) -> list[Any]:
    query, keys, values, output, slopes, sinks, table, own_tokens = moving
    weights, quantized = plan.spans.reweighting, layer.quantized
    unit = _FORMATS[quantized.dtype][1] if quantized else 1.0
    key_scale = quantized.key_scale * unit if quantized else 1.0
    value_scale = quantized.value_scale * unit if quantized else 1.0
    return [
        query, *query.stride()[:2],
        keys, keys.stride(1), values, values.stride(1),
        output, *output.stride()[:2], *partials,
        table, table.stride(0), plan.cos_sin, slopes, sinks,
        tile_class.query, tile_class.request, tile_class.column, tile_class.items,
        tiles.segments, tiles.read_span, tiles.read_position,
        tiles.own_first_slot, own_tokens, tiles.own_position, tiles.query_end,
        weights and weights.temperature, layer.scale * key_scale, layer.softcap,
        layer.window or 0, value_scale,
    ]  # fmt: skip


def _constants(moving: Moving, plan: SpanPlan, layer: LayerAttention) -> dict[str, Any]:
    """Constants of `attend_tiles`, but for the number of rows."""
    query, keys, values = moving.query, moving.keys, moving.values
    rotary_dim = 0 if plan.cos_sin is None else plan.cos_sin.shape[1]
    padded, padded_value = map(triton.next_power_of_2, (query.shape[2], values.shape[3]))
    is_latent = layer.value_size is not None
    behind = max(MIN_ROWS, triton.next_power_of_2(query.shape[2] - values.shape[3]))
    return {
        "BLOCK_STRIDE": keys.stride(0),
        "KEY_SLOT": keys.stride(2),
        "KEY_DIM": keys.stride(3),
        "VALUE_SLOT": values.stride(2),
        "VALUE_DIM": values.stride(3),
        "NUM_KV_HEADS": keys.shape[1],
        "GROUP_HEADS": query.shape[1] // keys.shape[1],
        "HEAD_SIZE": query.shape[2],
        "PADDED_HEAD_SIZE": behind if is_latent else padded,
        "VALUE_SIZE": values.shape[3],
        "PADDED_VALUE_SIZE": padded_value,
        "IS_LATENT": is_latent,
        "ROTARY_OFFSET": layer.value_size or 0,
        "ROTARY_DIM": rotary_dim,
        "IS_NEOX": layer.is_neox,
        "RUN": math.gcd(rotary_dim // 2, layer.value_size or 0, 16),
        "HAS_SOFTCAP": layer.softcap > 0,
        "HAS_ALIBI": layer.alibi_slopes is not None,
        "HAS_WINDOW": layer.window is not None,
        "HAS_SINKS": layer.sinks is not None,
        "HAS_TEMPERATURE": plan.spans.reweighting is not None,
        "BLOCK_SIZE": plan.spans.block_size,
        "CHUNK": _chunk_tokens(padded_value if is_latent else padded, is_latent, query.dtype),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "WIDEN": query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "FORMAT": _FORMATS[layer.quantized.dtype][0] if layer.quantized else 0,
    }


def _merge(
    moving: Moving,
    plan: SpanPlan,
    layer: LayerAttention,
    tiles: Tiles,
    partials: tuple[torch.Tensor, torch.Tensor],
) -> KernelLaunch:
    """Launch of the merge of partial results."""
    output, weights = moving.output, plan.spans.reweighting
    return KernelLaunch(
        merge_partials,
        (tiles.merged_query.numel(), output.shape[1]),
        [
            output, *output.stride()[:2], *partials,
            tiles.merged_query, tiles.partial_start_loc, tiles.partial, moving.sinks,
            tiles.merged_request, tiles.merged_chosen, weights and weights.factor,
        ],
        _MERGE_PLACES,
        {
            "VALUE_SIZE": output.shape[2],
            "PADDED_VALUE_SIZE": triton.next_power_of_2(output.shape[2]),
            "HAS_SINKS": layer.sinks is not None,
            "HAS_TEMPERATURE": weights is not None,
        },
        {"num_warps": 1},
    )  # fmt: skip
