# SPDX-License-Identifier: Apache-2.0
"""Cutting of a batch's work into the tiles and items of ``vllm_choreo.ops.tiles``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np
import torch

from vllm_choreo.ops.ragged import any_of, bounds_of, entries_of
from vllm_choreo.ops.sharing import SharedReads, check_reads
from vllm_choreo.ops.spans import SpanBatch
from vllm_choreo.ops.tile_arrays import ClassArrays, TileArrays
from vllm_choreo.ops.tile_queries import QueryTiles, Readers, Segments, cut_queries
from vllm_choreo.ops.tiles import MIN_ROWS, MIN_SPLIT_TOKENS, Tiles

# Items begin at multiples of this within their tile, so that programs load whole chunks.
SPLIT_UNIT = 64
# Tokens that could be read in the time in which a program begins an item.
_ITEM_TOKENS = 128
# Items of a launch, in multiples of what runs at once, up to which finer ones are tried.
_MOST_WAVES = 5


class CutSizes(TypedDict):
    """Sizes of layers and device by which work is cut.

    Attributes:
        num_heads, num_kv_heads: heads of the layer (of this worker's share of it).
        max_rows: rows of a tile at most, a power of two; more where one query has more heads.
        num_programs: function of a number of rows: programs of such tiles that the device runs at
            once.
        window: window of the layers (see ``LayerAttention``): tokens of a parent that no query of
            a tile sees are left out of its segments.
    """

    num_heads: int
    num_kv_heads: int
    max_rows: int
    num_programs: Callable[[int], int]
    window: NotRequired[int | None]


def plan_tiles(
    batch: SpanBatch,
    reads: SharedReads | None,
    *,
    device: torch.device | str,
    max_partials: int | None = None,
    **sizes: Unpack[CutSizes],
) -> Tiles:
    """Cut the work of a batch into tiles and items, whose tensors lie on a device.

    Args:
        batch, reads, sizes: see ``cut_tiles``.
        device: device of the plan's tensors.
        max_partials: rows of partial results that there is room for.
    """
    most = math.inf if max_partials is None else max_partials
    return cut_tiles(batch, reads, lambda plan: plan.num_partials <= most, **sizes).to(device)


def cut_tiles(
    batch: SpanBatch,
    reads: SharedReads | None,
    fits: Callable[[TileArrays], bool],
    **sizes: Unpack[CutSizes],
) -> TileArrays:
    """Cut the work of a batch into tiles and items, in host memory.

    Args:
        batch: spans whose tensors lie in host memory, but for the block table, which is not used.
        reads: ``plan_shared_reads`` of the batch; None: each request reads for itself.
        fits: says whether there is room for a plan. Where there is none long tiles are not split,
            then groups not read together; the last of these plans is returned as it is.
        sizes: see ``CutSizes``.
    """
    check_reads(batch, reads)
    num_kv_heads, window = sizes["num_kv_heads"], sizes.get("window")
    group_heads = sizes["num_heads"] // num_kv_heads
    max_rows = max(sizes["max_rows"], _power_of_two(group_heads))

    def num_slots(rows: int) -> int:
        return sizes["num_programs"](rows) // num_kv_heads

    # Together and split, together, alone and split, alone: that leaves no partial results at all,
    # but of spans that count by other weights.
    for readers in _readers(batch, reads):
        tiles = cut_queries(batch, readers, group_heads, max_rows, window)
        for slots in (num_slots, None):
            items = _cut_items(tiles, slots)
            plan = _finish(batch, readers, tiles, items, group_heads)
            if fits(plan):
                return plan
    return plan


def _readers(batch: SpanBatch, reads: SharedReads | None) -> Iterator[Readers]:
    """Readers of the batch: together as planned, then each for itself."""
    if reads is not None:
        yield Readers.of_reads(batch, reads)
    yield Readers.alone(batch, reads)


# -- items -----------------------------------------------------------------------------------------


class _Items(NamedTuple):
    """Items of tiles, one behind the other, and the segments that they are made of.

    Attributes:
        segments: segments of all tiles, cut where items end.
        num_items: int64 ``[num_tiles]``, of each tile.
        first, end: ``[num_items]``, segments of each, counted from the tile's first one.
        own, share, shares: ``[num_items]``, as in ``TileClass``.
        first_partial: ``[num_tiles]``, first row of partial results, or -1.
        num_partials: rows of partial results.
    """

    segments: Segments
    num_items: np.ndarray
    first: np.ndarray
    end: np.ndarray
    own: np.ndarray
    share: np.ndarray
    shares: np.ndarray
    first_partial: np.ndarray
    num_partials: int


def _costs(tiles: QueryTiles) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each tile, and what it costs to read and to compute with them."""
    of_parents: np.ndarray = np.zeros(len(tiles.num_rows), dtype=np.int64)
    np.add.at(of_parents, tiles.segments.tile, tiles.segments.num_tokens)
    num_tokens = of_parents + tiles.own_tokens
    # Reading keys and values costs about as much as computing MIN_ROWS rows.
    return num_tokens, num_tokens * (tiles.num_rows + MIN_ROWS)


def _cut_items(tiles: QueryTiles, num_slots: Callable[[int], int] | None) -> _Items:
    """Share out the tokens of long tiles.

    Tiles of one size are a launch, and launches run one after the other: so each of them is to
    fill the device.

    Args:
        num_slots: function of a number of rows: items of such tiles that run at once; None: do
            not split.
    """
    num_tokens, cost = _costs(tiles)
    splits: np.ndarray = np.ones(len(cost), dtype=np.int64)
    if num_slots is not None:
        for rows in np.unique(tiles.num_rows).tolist():
            of_size = tiles.num_rows == rows
            splits[of_size] = _num_shares(cost[of_size], num_tokens[of_size], rows, num_slots(rows))
    share = -(-num_tokens // splits)
    share = np.maximum(-(-share // SPLIT_UNIT) * SPLIT_UNIT, SPLIT_UNIT)
    segments, part = _cut_segments(tiles.segments, np.where(splits > 1, share, num_tokens + 1))
    return _share_out(tiles, segments, part, share)


def _num_shares(
    cost: np.ndarray, num_tokens: np.ndarray, num_rows: int, num_slots: int
) -> np.ndarray:
    """Into how many items each tile of a launch is split.

    So that all items run at once, if they fill the device then. Else finer ones may end sooner: 40
    equal tiles of which 33 run at once take twice their time, in 4 items each 5 quarters of it.
    """
    total = int(cost.sum())
    best: np.ndarray = np.ones(len(cost), dtype=np.int64)
    if not num_slots or not total:
        return best
    begin, least = _ITEM_TOKENS * (num_rows + MIN_ROWS), math.inf
    for waves in range(1, _MOST_WAVES + 1):
        counts = np.minimum(cost * num_slots * waves // total, num_tokens // MIN_SPLIT_TOKENS)
        counts = np.maximum(counts, 1)
        num_items = int(counts.sum())
        mean = total / num_items
        # The items but the longest, as if they were equal, then what that one takes more.
        longest = float((cost / counts).max())
        time = math.ceil(num_items / num_slots) * (mean + begin) + longest - mean
        if time < least:
            best, least = counts, time
        is_full = 0.9 * num_slots <= num_items <= num_slots
        if is_full or len(cost) > _MOST_WAVES * num_slots:
            break
    return best


def _cut_segments(segments: Segments, share: np.ndarray) -> tuple[Segments, np.ndarray]:
    """Cut segments at multiples of their tiles' shares; also returns the share of each.

    Args:
        share: tokens of a share, by tile.
    """
    of_tile = np.bincount(segments.tile, minlength=len(share))
    ends = np.cumsum(segments.num_tokens)
    before_tile = np.concatenate([[0], ends])[bounds_of(of_tile)[segments.tile]]
    end = ends - before_tile  # in its tile
    start, size = end - segments.num_tokens, share[segments.tile]
    first = start // size
    segment, index = entries_of((end - 1) // size - first + 1)
    part = first[segment] + index
    begin = np.maximum(start[segment], part * size[segment])
    stop = np.minimum(end[segment], (part + 1) * size[segment])
    done = begin - start[segment]
    whole = segments.only(segment)
    return whole._replace(
        slot=whole.slot + done, num_tokens=stop - begin, before=whole.before + done
    ), part


def _share_out(
    tiles: QueryTiles, segments: Segments, part: np.ndarray, share: np.ndarray
) -> _Items:
    """Make items of shares of the parents' tokens, and of the own ones.

    Few own tokens go with the last share, more have items of their own.
    """
    num_tiles = len(share)
    num_parts: np.ndarray = np.zeros(num_tiles, dtype=np.int64)
    np.maximum.at(num_parts, segments.tile, part + 1)
    has_own = tiles.own_request >= 0
    own_shares = np.maximum(1, np.rint(tiles.own_tokens / share).astype(np.int64)) * has_own
    apart = np.where(own_shares > 1, own_shares, 0)
    count = np.where(own_shares == 1, np.maximum(num_parts, 1), num_parts + apart)
    tile, index = entries_of(count)
    # Bounds of the shares, counted from the tile's first segment.
    parts = bounds_of(num_parts)
    sizes = np.bincount(parts[segments.tile] + part, minlength=int(parts[-1]))
    bounds = bounds_of(sizes)
    from_tile = bounds[parts[:-1]]
    is_part = index < num_parts[tile]
    at = np.where(is_part, parts[:-1][tile] + index, parts[1:][tile])
    first = bounds[at] - from_tile[tile]
    end = bounds[at + is_part] - from_tile[tile]
    with_last = (own_shares[tile] == 1) & (index == count[tile] - 1)
    is_own = with_last | ~is_part
    num_results: np.ndarray = np.zeros(int(tiles.queries.query.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(num_results, tiles.queries.query, count[tiles.queries.tile])
    is_partial = any_of(num_results[tiles.queries.query] > 1, tiles.queries.tile, num_tiles)
    rows = count * np.bincount(tiles.queries.tile, minlength=num_tiles) * is_partial
    return _Items(
        segments,
        count,
        first,
        end,
        np.where(is_own, tiles.own_request[tile], -1),
        np.where(is_part, 0, index - num_parts[tile]) * is_own,
        np.where(is_own, own_shares[tile], 0),
        np.where(is_partial, np.cumsum(rows) - rows, -1),
        int(rows.sum()),
    )


# -- arrays ----------------------------------------------------------------------------------------


def _finish(
    batch: SpanBatch, readers: Readers, tiles: QueryTiles, items: _Items, group_heads: int
) -> TileArrays:
    """Make the arrays of the plan."""
    own = batch.span_start_loc.numpy()[1:].astype(np.int64) - 1
    order = np.argsort(-_costs(tiles)[1], kind="stable")  # the longest starts first
    _, segment = _runs(order, np.bincount(items.segments.tile, minlength=len(order)))
    first_slot, num_tokens = batch.first_slot.numpy(), batch.num_tokens.numpy()
    arrays: dict[str, np.ndarray] = {
        "segments": np.stack([column[segment] for column in items.segments[1:]], axis=1),
        "read_span": readers.read_span,
        "read_position": tiles.read_position,
        "own_first_slot": first_slot[own],
        "own_tokens": num_tokens[own],
        "own_position": batch.stored_position.numpy()[own],
        "query_end": batch.query_start_loc.numpy()[1:],
        **_merges(batch, tiles, items, order),
    }
    sizes = np.unique(tiles.num_rows).tolist()
    classes = tuple(_class_arrays(tiles, items, order, size, group_heads) for size in sizes)
    return TileArrays(classes, arrays, items.num_partials)


def _runs(order: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries of runs in another order: index of the run in `order`, and of the entry."""
    run, index = entries_of(lengths[order])
    return run, bounds_of(lengths)[order[run]] + index


def _merges(
    batch: SpanBatch, tiles: QueryTiles, items: _Items, order: np.ndarray
) -> Mapping[str, np.ndarray]:
    """Rows of partial results of each merged query, those that count by other weights first."""
    size = np.bincount(tiles.queries.tile, minlength=len(order))
    ordered = order[items.first_partial[order] >= 0]
    run, index = entries_of((items.num_items * size)[ordered])
    tile = ordered[run]
    row = items.first_partial[tile] + index
    query = tiles.queries.query[bounds_of(size)[tile] + index % size[tile]]
    is_chosen = tiles.is_chosen[tile]
    by_query = np.argsort(2 * query + ~is_chosen, kind="stable")
    merged, num_rows = np.unique(query, return_counts=True)
    num_chosen = np.bincount(query[is_chosen], minlength=int(merged.max(initial=-1)) + 1)
    ends = batch.query_start_loc.numpy()[1:]
    return {
        "merged_query": merged,
        "partial_start_loc": bounds_of(num_rows),
        "partial": row[by_query],
        "merged_request": np.searchsorted(ends, merged, side="right"),
        "merged_chosen": num_chosen[merged],
    }


def _class_arrays(
    tiles: QueryTiles, items: _Items, order: np.ndarray, num_rows: int, group_heads: int
) -> ClassArrays:
    """Arrays of the tiles of a size."""
    queries, of_size = tiles.queries, order[tiles.num_rows[order] == num_rows]
    size = np.bincount(queries.tile, minlength=len(order))
    tile_index, entry = _runs(of_size, size)
    shape = len(of_size), num_rows // group_heads

    def by_slot(column: np.ndarray, empty: int = 0) -> np.ndarray:
        slots: np.ndarray = np.full(shape, empty, dtype=np.int64)
        slots[tile_index, queries.slot[entry]] = column[entry]
        return slots

    # Segments lie in the order of all tiles, whatever their size.
    num_segments = np.bincount(items.segments.tile, minlength=len(order))
    base: np.ndarray = np.empty(len(order), dtype=np.int64)
    base[order] = bounds_of(num_segments[order])[:-1]
    index, item = _runs(of_size, items.num_items)
    tile = of_size[index]
    partial = items.first_partial[tile]
    number = item - bounds_of(items.num_items)[tile]
    columns = (
        index,
        base[tile] + items.first[item],
        base[tile] + items.end[item],
        items.own[item],
        items.share[item],
        items.shares[item],
        np.where(partial >= 0, partial + number * size[tile], -1),
        tiles.is_chosen[tile],
    )
    return ClassArrays(
        num_rows,
        query=by_slot(queries.query, -1),
        request=by_slot(queries.request),
        column=by_slot(queries.column),
        items=np.stack([column.astype(np.int64) for column in columns], axis=1),
    )


def _power_of_two(n: int) -> int:
    """Smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
