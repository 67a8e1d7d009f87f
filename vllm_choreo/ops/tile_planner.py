# SPDX-License-Identifier: Apache-2.0
"""Cutting of a batch's work into the tiles and items of ``vllm_choreo.ops.tiles``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from vllm_choreo.ops.sharing import Group, SharedPiece, SharedReads, check_reads
from vllm_choreo.ops.spans import SpanBatch, ints
from vllm_choreo.ops.tiles import MIN_ROWS, MIN_SPLIT_TOKENS, TileClass, Tiles

# Items begin at multiples of this within their tile, so that programs load whole chunks.
SPLIT_UNIT = 64
# Tokens that could be read in the time in which a program begins an item.
_ITEM_TOKENS = 128
# Items of a launch, in multiples of what runs at once, up to which finer ones are tried.
_MOST_WAVES = 5


def plan_tiles(
    batch: SpanBatch,
    reads: SharedReads | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    max_rows: int,
    num_programs: Callable[[int], int],
    device: torch.device | str,
    max_partials: int | None = None,
    window: int | None = None,
) -> Tiles:
    """Cut the work of a batch into tiles and items.

    Args:
        batch: spans whose tensors lie in host memory, but for the block table, which is not used.
        reads: ``plan_shared_reads`` of the batch; None: each request reads for itself.
        num_heads, num_kv_heads: heads of the layer (of this worker's share of it).
        max_rows: rows of a tile at most, a power of two; more where one query has more heads.
        num_programs: function of a number of rows: programs of such tiles that the device runs at
            once.
        device: device of the plan's tensors.
        max_partials: rows of partial results that there is room for. If they would be more, long
            tiles are not split, then groups not read together.
        window: window of the layers (see ``LayerAttention``): tokens of a parent that no query of
            a tile sees are left out of its segments.
    """
    check_reads(batch, reads)
    group_heads = num_heads // num_kv_heads
    alone, apart = list(_alone(batch)), []
    groups = alone
    if reads is not None:
        groups = reads.groups()
        groups, apart = groups[: reads.first_chosen], groups[reads.first_chosen :]
    # Together and split, together, alone and split, alone: that leaves no partial results at all,
    # but of spans that count by other weights.
    for found, is_split in ((groups, True), (groups, False), (alone, True), (alone, False)):
        planner = _Planner(batch, group_heads, max_rows, window)
        for g, group in enumerate(found):
            planner.add_group(group, has_own=g < batch.num_reqs)
        for group in apart:
            planner.add_group(group, has_own=False, is_chosen=True)
        if is_split:
            planner.split(lambda rows: num_programs(rows) // num_kv_heads)
        else:
            planner.split(lambda rows: 0)
        if max_partials is None or planner.num_partials <= max_partials:
            break
    return planner.finish(device)


def _alone(batch: SpanBatch) -> Iterator[Group]:
    """Groups of single requests, each with its parents' spans that count as they are."""
    start, num_tokens = ints(batch.span_start_loc), ints(batch.num_tokens)
    given = batch.reweighting
    is_chosen = [0] * batch.num_spans if given is None else ints(given.is_chosen)
    for r in range(batch.num_reqs):
        spans = [j for j in range(start[r], start[r + 1] - 1) if not is_chosen[j]]
        yield Group((r,), [SharedPiece(num_tokens[j], ((j, 0),)) for j in spans])


@dataclass(eq=False)
class _Tile:
    """One tile: queries as (query, request, column) each, segments as in ``Tiles``."""

    queries: list[tuple[int, int, int]]
    segments: list[tuple[int, ...]]
    num_rows: int
    own_request: int  # or -1
    own_tokens: int  # of those that its last query sees
    is_chosen: bool  # counts by other weights
    items: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    first_partial: int = -1

    @property
    def num_tokens(self) -> int:
        return sum(segment[3] for segment in self.segments) + self.own_tokens

    @property
    def cost(self) -> int:
        # Reading keys and values costs about as much as computing MIN_ROWS rows.
        return self.num_tokens * (self.num_rows + MIN_ROWS)


class _Planner:
    def __init__(
        self, batch: SpanBatch, group_heads: int, max_rows: int, window: int | None
    ) -> None:
        self.group_heads = group_heads
        self.window = window
        self.max_rows = max(max_rows, _power_of_two(group_heads))
        self.first_slot, self.num_tokens = ints(batch.first_slot), ints(batch.num_tokens)
        self.stored, self.delta = ints(batch.stored_position), ints(batch.position_delta)
        self.query_start = ints(batch.query_start_loc)
        self.own_spans = [end - 1 for end in ints(batch.span_start_loc)[1:]]
        self.reads: list[tuple[int, int]] = []  # span, position
        self.tiles: list[_Tile] = []
        self.num_partials = 0

    # -- tiles -------------------------------------------------------------------------------

    def add_group(self, group: Group, has_own: bool, is_chosen: bool = False) -> None:
        """Cut the queries of a group's members into tiles; with own tokens there is one member."""
        segments = [self._segment(group.members[0], piece) for piece in group.pieces]
        queries = [
            (query, r, column)
            for column, r in enumerate(group.members)
            for query in range(self.query_start[r], self.query_start[r + 1])
        ]
        most = self.max_rows // self.group_heads
        for begin in range(0, len(queries) if segments or has_own else 0, most):
            chosen = queries[begin : begin + most]
            last, request, _ = chosen[-1]
            own = self._own_index(last, request) + 1 if has_own else 0
            if self.window is not None:
                own = min(own, self.window + len(chosen) - 1)
            rows = self._num_rows(len(chosen) * self.group_heads)
            seen = self._seen(segments, chosen)
            if seen or has_own:
                own_request = request if has_own else -1
                self.tiles.append(_Tile(chosen, seen, rows, own_request, own, is_chosen))

    def _own_index(self, query: int, request: int) -> int:
        """Index of a query among its request's own tokens."""
        own = self.num_tokens[self.own_spans[request]]
        return own - self.query_start[request + 1] + query

    def _seen(
        self, segments: Sequence[tuple[int, ...]], queries: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, ...]]:
        """Segments without the beginnings that none of the queries sees."""
        if self.window is None:
            return list(segments)
        first: dict[int, int] = {}  # position of the first query, by column
        for query, request, column in queries:
            own = self.stored[self.own_spans[request]]
            first.setdefault(column, own + self._own_index(query, request))
        found: list[tuple[int, ...]] = []
        for read, request, slot, num_tokens, _ in segments:
            hidden = min(
                position + 1 - self.window - self.reads[read + column][1]
                for column, position in first.items()
            )
            hidden = max(hidden, 0)
            if hidden < num_tokens:
                found.append((read, request, slot + hidden, num_tokens - hidden, hidden))
        return found

    def _segment(self, request: int, piece: SharedPiece) -> tuple[int, ...]:
        first_read = len(self.reads)
        for span, begin in piece.reads:
            self.reads.append((span, self.stored[span] + begin - self.delta[span]))
        span, begin = piece.reads[0]
        return first_read, request, self.first_slot[span] + begin, piece.num_tokens, 0

    def _num_rows(self, rows: int) -> int:
        """Rows of a tile: smallest, middle or largest; each size in use is one launch more."""
        sizes = (MIN_ROWS, 4 * MIN_ROWS, self.max_rows)
        return next(size for size in sizes if rows <= size <= self.max_rows)

    # -- items -------------------------------------------------------------------------------

    def split(self, num_slots: Callable[[int], int]) -> None:
        """Share out the tokens of long tiles.

        Tiles of one size are a launch, and launches run one after the other: so each of them is to
        fill the device.

        Args:
            num_slots: function of a number of rows: items of such tiles that run at once; 0: do not
                split.
        """
        by_size: dict[int, list[_Tile]] = {}
        for tile in self.tiles:
            by_size.setdefault(tile.num_rows, []).append(tile)
        for num_rows, tiles in by_size.items():
            for tile, count in zip(tiles, _num_shares(tiles, num_slots(num_rows)), strict=True):
                self._split(tile, count)
        num_results: dict[int, int] = {}
        for tile in self.tiles:
            for query, _, _ in tile.queries:
                num_results[query] = num_results.get(query, 0) + len(tile.items)
        for tile in self.tiles:
            if any(num_results[query] > 1 for query, _, _ in tile.queries):
                tile.first_partial = self.num_partials
                self.num_partials += len(tile.items) * len(tile.queries)

    def _split(self, tile: _Tile, num_splits: int) -> None:
        """Split a tile's tokens into items.

        An item is (first segment, end segment, own request or -1, own share, own shares).
        """
        share = -(-tile.num_tokens // num_splits)
        share = -(-share // SPLIT_UNIT) * SPLIT_UNIT
        cut = list(_cut(tile.segments, share)) if num_splits > 1 else [tile.segments]
        tile.segments = [segment for part in cut for segment in part]
        bounds, begin = [], 0
        for part in cut:
            bounds.append((begin, begin + len(part)))
            begin += len(part)
        own = tile.own_request
        if own < 0:
            tile.items = [(*bound, -1, 0, 0) for bound in bounds]
            return
        own_shares = max(1, round(tile.own_tokens / share))
        if own_shares == 1:  # its few tokens go with the last, shortest share
            tile.items = [(*bound, -1, 0, 0) for bound in bounds[:-1]]
            tile.items.append((*(bounds or [(0, 0)])[-1], own, 0, 1))
            return
        tile.items = [(*bound, -1, 0, 0) for bound in bounds if bound[0] < bound[1]]
        tile.items += [(begin, begin, own, i, own_shares) for i in range(own_shares)]

    # -- tensors -----------------------------------------------------------------------------

    def finish(self, device: torch.device | str) -> Tiles:
        """Make tensors of the plan, in one copy to the device."""
        segments: list[tuple[int, ...]] = []
        # By query: the rows of partial results that count by other weights, and the others.
        rows_of: dict[int, tuple[list[int], list[int]]] = {}
        request_of: dict[int, int] = {}
        by_size: dict[int, list[tuple[_Tile, int]]] = {}
        for tile in sorted(self.tiles, key=lambda tile: -tile.cost):  # the longest starts first
            by_size.setdefault(tile.num_rows, []).append((tile, len(segments)))
            segments += tile.segments
            request_of.update((query, request) for query, request, _ in tile.queries)
            if tile.first_partial >= 0:
                self._list_partials(tile, rows_of)
        merged = sorted(rows_of)
        starts = [0]
        for query in merged:
            starts.append(starts[-1] + sum(map(len, rows_of[query])))
        own = self.own_spans
        arrays: dict[str, Sequence] = {
            "segments": segments,
            "read_span": [span for span, _ in self.reads],
            "read_position": [position for _, position in self.reads],
            "own_first_slot": [self.first_slot[j] for j in own],
            "own_tokens": [self.num_tokens[j] for j in own],
            "own_position": [self.stored[j] for j in own],
            "query_end": self.query_start[1:],
            "merged_query": merged,
            "partial_start_loc": starts,
            "partial": [row for query in merged for rows in rows_of[query] for row in rows],
            "merged_request": [request_of[query] for query in merged],
            "merged_chosen": [len(rows_of[query][0]) for query in merged],
        }
        sizes = sorted(by_size)
        lists = [list(self._class_arrays(size, by_size[size])) for size in sizes]
        tensors = iter(_to_device([*arrays.values(), *(a for four in lists for a in four)], device))
        common = {name: next(tensors) for name in arrays}
        classes = tuple(
            TileClass(size, next(tensors), next(tensors), next(tensors), next(tensors))
            for size in sizes
        )
        return Tiles(classes=classes, num_partials=self.num_partials, **common)

    def _list_partials(self, tile: _Tile, rows_of: dict[int, tuple[list[int], list[int]]]) -> None:
        row = tile.first_partial
        for _ in tile.items:
            for query, _, _ in tile.queries:
                rows_of.setdefault(query, ([], []))[not tile.is_chosen].append(row)
                row += 1

    def _class_arrays(self, num_rows: int, tiles: Sequence[tuple[_Tile, int]]) -> Iterator[list]:
        """Lists for a `TileClass`: query, request, column and items of the tiles of a size.

        Args:
            tiles: tiles, each with the index of its first segment.
        """
        width = num_rows // self.group_heads
        padding = [(-1, 0, 0)]
        slots = [[*t.queries, *padding * (width - len(t.queries))] for t, _ in tiles]
        for i in range(3):
            yield [[slot[i] for slot in of_tile] for of_tile in slots]
        yield [
            (index, base + first, base + end, own, share, shares,
             tile.first_partial + i * len(tile.queries) if tile.first_partial >= 0 else -1,
             int(tile.is_chosen))
            for index, (tile, base) in enumerate(tiles)
            for i, (first, end, own, share, shares) in enumerate(tile.items)
        ]  # fmt: skip


def _num_shares(tiles: Sequence[_Tile], num_slots: int) -> list[int]:
    """Into how many items each tile of a launch is split.

    So that all items run at once, if they fill the device then. Else finer ones may end sooner: 40
    equal tiles of which 33 run at once take twice their time, in 4 items each 5 quarters of it.
    """
    total = sum(tile.cost for tile in tiles)
    if not num_slots or not total:
        return [1] * len(tiles)
    begin = _ITEM_TOKENS * (tiles[0].num_rows + MIN_ROWS)
    best, least = [1] * len(tiles), math.inf
    for waves in range(1, _MOST_WAVES + 1):
        counts = [
            max(1, min(tile.cost * num_slots * waves // total, tile.num_tokens // MIN_SPLIT_TOKENS))
            for tile in tiles
        ]
        longest = max(tile.cost / count for tile, count in zip(tiles, counts, strict=True))
        mean = total / sum(counts)
        # The items but the longest, as if they were equal, then what that one takes more.
        time = math.ceil(sum(counts) / num_slots) * (mean + begin) + longest - mean
        if time < least:
            best, least = counts, time
        is_full = 0.9 * num_slots <= sum(counts) <= num_slots
        if is_full or len(tiles) > _MOST_WAVES * num_slots:
            break
    return best


def _power_of_two(n: int) -> int:
    """Smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def _cut(segments: Sequence[tuple[int, ...]], share: int) -> Iterator[list[tuple[int, ...]]]:
    """Runs of segments with `share` tokens each, the last one with what is left."""
    part: list[tuple[int, ...]] = []
    num_left = share
    for read, request, slot, num_tokens, before in segments:
        done = 0
        while done < num_tokens:
            taken = min(num_left, num_tokens - done)
            part.append((read, request, slot + done, taken, before + done))
            done += taken
            num_left -= taken
            if num_left == 0:
                yield part
                part, num_left = [], share
    if part:
        yield part


def _to_device(arrays: Sequence[Sequence], device: torch.device | str) -> list[torch.Tensor]:
    """Int32 tensors on a device, cut out of one buffer at multiples of 16 bytes."""
    tensors = [torch.tensor(array, dtype=torch.int32) for array in arrays]
    padded = [-(-tensor.numel() // 4) * 4 for tensor in tensors]
    buffer = torch.zeros(sum(padded), dtype=torch.int32)
    if torch.device(device).type != "cpu":
        buffer = buffer.pin_memory()
    for part, tensor in zip(buffer.split(padded), tensors, strict=True):
        part[: tensor.numel()] = tensor.flatten()
    moved = buffer.to(device, non_blocking=True).split(padded)
    return [
        part[: tensor.numel()].view(tensor.shape)
        for part, tensor in zip(moved, tensors, strict=True)
    ]
