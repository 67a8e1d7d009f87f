# SPDX-License-Identifier: Apache-2.0
"""The queries of a batch in tiles, each with the tokens that its group of readers reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_choreo.ops.ragged import any_of, bounds_of, entries_of
from vllm_choreo.ops.sharing import SharedReads
from vllm_choreo.ops.spans import SpanBatch
from vllm_choreo.ops.tiles import MIN_ROWS


class Readers(NamedTuple):
    """Groups of readers and what they read, as in ``SharedReads``; members by groups.

    Attributes:
        member_start, piece_start, read_start: ``[num_groups + 1]``.
        member_req, piece_tokens, read_span, read_begin: see ``SharedReads``.
        has_own: bool ``[num_groups]``, the group is one request, which reads its own tokens, too.
        is_chosen: bool ``[num_groups]``, its spans count by other weights.
    """

    member_start: np.ndarray
    member_req: np.ndarray
    piece_start: np.ndarray
    piece_tokens: np.ndarray
    read_start: np.ndarray
    read_span: np.ndarray
    read_begin: np.ndarray
    has_own: np.ndarray
    is_chosen: np.ndarray

    @staticmethod
    def of_reads(batch: SpanBatch, reads: SharedReads) -> Readers:
        """Readers as they are planned."""
        group = np.arange(reads.num_groups)
        tensors = (
            *(reads.member_start_loc, reads.member_req, reads.piece_start_loc, reads.piece_tokens),
            *(reads.read_start_loc, reads.read_span, reads.read_begin),
        )
        arrays = [tensor.numpy().astype(np.int64) for tensor in tensors]
        return Readers._make([*arrays, group < batch.num_reqs, group >= reads.first_chosen])

    @staticmethod
    def alone(batch: SpanBatch, reads: SharedReads | None) -> Readers:
        """Readers who read for themselves; spans that count by other weights stay apart.

        Args:
            reads: where these are planned.
        """
        start = batch.span_start_loc.numpy().astype(np.int64)
        is_plain: np.ndarray = np.ones(batch.num_spans, dtype=bool)
        is_plain[start[1:] - 1] = False
        if batch.reweighting is not None:
            is_plain &= batch.reweighting.is_chosen.numpy() == 0
        span, request = np.flatnonzero(is_plain), np.arange(batch.num_reqs)
        reader = np.searchsorted(start, span, side="right") - 1
        pieces = bounds_of(np.bincount(reader, minlength=batch.num_reqs))
        tokens = batch.num_tokens.numpy().astype(np.int64)[span]
        everyone: np.ndarray = np.ones(batch.num_reqs, dtype=bool)
        members = np.arange(batch.num_reqs + 1)
        alone = Readers(
            *(members, request, pieces, tokens, pieces, span, np.zeros_like(span)),
            has_own=everyone,
            is_chosen=~everyone,
        )
        if reads is None or reads.first_chosen == reads.num_groups:
            return alone
        return alone.with_last(Readers.of_reads(batch, reads), reads.first_chosen)

    def with_last(self, other: Readers, first: int) -> Readers:
        """Add the groups of `other` from `first` on."""

        def joined(bounds: np.ndarray, more: np.ndarray) -> np.ndarray:
            return np.concatenate([bounds, more[first + 1 :] - more[first] + bounds[-1]])

        members, pieces, reads = (
            int(bounds[first])
            for bounds in (other.member_start, other.piece_start, other.read_start)
        )
        entries = {
            "member_req": members, "piece_tokens": pieces, "read_span": reads, "read_begin": reads,
            "has_own": first, "is_chosen": first,
        }  # fmt: skip
        columns = {
            name: np.concatenate([getattr(self, name), getattr(other, name)[begin:]])
            for name, begin in entries.items()
        }
        bounds = {
            name: joined(getattr(self, name), getattr(other, name))
            for name in ("member_start", "piece_start", "read_start")
        }
        return Readers(**columns, **bounds)


class Queries(NamedTuple):
    """Queries of tiles, one behind the other: int64 ``[num_entries]`` each.

    Attributes:
        query, request, column: as in ``TileClass``.
        tile: the tile, ascending.
        slot: index in the tile.
    """

    query: np.ndarray
    request: np.ndarray
    column: np.ndarray
    tile: np.ndarray
    slot: np.ndarray


class Segments(NamedTuple):
    """Segments of tiles, one behind the other: int64 ``[num_segments]`` each.

    Attributes:
        tile: the tile, ascending.
        read, request, slot, num_tokens, before: the columns of ``Tiles.segments``.
    """

    tile: np.ndarray
    read: np.ndarray
    request: np.ndarray
    slot: np.ndarray
    num_tokens: np.ndarray
    before: np.ndarray

    def only(self, chosen: np.ndarray) -> Segments:
        """Some of the segments."""
        return Segments(*(column[chosen] for column in self))


class QueryTiles(NamedTuple):
    """Tiles that are not cut into items yet.

    Attributes:
        queries, segments: those of all tiles.
        num_rows: ``[num_tiles]``, rows of each.
        own_request: ``[num_tiles]``, the request whose own tokens are read, or -1.
        own_tokens: ``[num_tiles]``, of those that the last query sees.
        is_chosen: bool ``[num_tiles]``, its spans count by other weights.
        read_position: ``[num_reads]``, as in ``Tiles``.
    """

    queries: Queries
    segments: Segments
    num_rows: np.ndarray
    own_request: np.ndarray
    own_tokens: np.ndarray
    is_chosen: np.ndarray
    read_position: np.ndarray


def cut_queries(
    batch: SpanBatch, readers: Readers, group_heads: int, max_rows: int, window: int | None
) -> QueryTiles:
    """Cut the queries of each group's members into tiles.

    Args:
        group_heads: query heads of a KV head.
        max_rows: rows of a tile at most; no fewer than `group_heads`.
        window: tokens of a parent that no query of a tile sees are left out.
    """
    is_read = readers.has_own | (np.diff(readers.piece_start) > 0)
    queries, group = _in_tiles(batch, readers, is_read, max_rows // group_heads)
    size = np.bincount(queries.tile, minlength=len(group))
    last = np.cumsum(size) - 1
    stored = batch.stored_position.numpy().astype(np.int64)
    own_index = _own_indices(batch, queries)
    has_own = readers.has_own[group]
    own_tokens = np.where(has_own, own_index[last] + 1, 0)
    own_request = np.where(has_own, queries.request[last], -1)
    span, begin = readers.read_span, readers.read_begin
    read_position = stored[span] + begin - batch.position_delta.numpy()[span]
    segments = _segments(batch, readers, group)
    if window is not None:
        own_tokens = np.minimum(own_tokens, window + size - 1)
        own_span = batch.span_start_loc.numpy()[1:].astype(np.int64) - 1
        position = stored[own_span[queries.request]] + own_index
        segments = _seen(segments, queries, position, read_position, window)
    is_kept = has_own | any_of(np.ones(len(segments.tile), dtype=bool), segments.tile, len(group))
    number = np.cumsum(is_kept) - 1
    chosen = is_kept[queries.tile]
    queries = Queries(*(column[chosen] for column in queries))
    return QueryTiles(
        queries._replace(tile=number[queries.tile]),
        segments._replace(tile=number[segments.tile]),
        _num_rows(size[is_kept] * group_heads, group_heads, max_rows),
        own_request[is_kept],
        own_tokens[is_kept],
        readers.is_chosen[group][is_kept],
        read_position,
    )


def _in_tiles(
    batch: SpanBatch, readers: Readers, is_read: np.ndarray, most: int
) -> tuple[Queries, np.ndarray]:
    """Queries of the groups that read anything, `most` in a tile; the group of each tile."""
    width = np.diff(readers.member_start)
    group_of_member, column_of_member = entries_of(width)
    start = batch.query_start_loc.numpy().astype(np.int64)
    lengths = np.diff(start)[readers.member_req] * is_read[group_of_member]
    member, index = entries_of(lengths)
    group = group_of_member[member]
    num_queries = np.bincount(group, minlength=len(width))
    in_group = np.arange(len(group)) - bounds_of(num_queries)[group]
    num_tiles = -(-num_queries // most)
    tile = bounds_of(num_tiles)[group] + in_group // most
    request = readers.member_req[member]
    queries = Queries(
        start[request] + index, request, column_of_member[member], tile, in_group % most
    )
    return queries, np.repeat(np.arange(len(width)), num_tiles)


def _own_indices(batch: SpanBatch, queries: Queries) -> np.ndarray:
    """Index of each query among its request's own tokens."""
    own_span = batch.span_start_loc.numpy()[1:].astype(np.int64) - 1
    own = batch.num_tokens.numpy().astype(np.int64)[own_span]
    end = batch.query_start_loc.numpy()[1:].astype(np.int64)
    index: np.ndarray = (own - end)[queries.request] + queries.query
    return index


def _segments(batch: SpanBatch, readers: Readers, group: np.ndarray) -> Segments:
    """Pieces of the groups that tiles belong to."""
    num_pieces = np.diff(readers.piece_start)
    tile, index = entries_of(num_pieces[group])
    of_group = group[tile]
    width = np.diff(readers.member_start)
    read = readers.read_start[of_group] + index * width[of_group]
    slot = batch.first_slot.numpy().astype(np.int64)[readers.read_span[read]]
    return Segments(
        tile,
        read,
        readers.member_req[readers.member_start[of_group]],
        slot + readers.read_begin[read],
        readers.piece_tokens[readers.piece_start[of_group] + index],
        np.zeros_like(read),
    )


def _seen(
    segments: Segments,
    queries: Queries,
    position: np.ndarray,
    read_position: np.ndarray,
    window: int,
) -> Segments:
    """Segments without the beginnings that none of the queries of their tile sees.

    Args:
        position: position of each query.
        read_position: position at which a member sees the first token of a piece.
    """
    if not len(segments.tile):
        return segments
    # Of a member's queries in a tile, the first one sees farthest back.
    is_first: np.ndarray = np.ones(len(queries.tile), dtype=bool)
    is_first[1:] = (np.diff(queries.tile) != 0) | (np.diff(queries.column) != 0)
    first = np.flatnonzero(is_first)
    num_columns = np.bincount(queries.tile[first], minlength=int(queries.tile[-1]) + 1)
    segment, index = entries_of(num_columns[segments.tile])
    member = first[bounds_of(num_columns)[segments.tile[segment]] + index]
    read = segments.read[segment] + queries.column[member]
    hidden = position[member] + 1 - window - read_position[read]
    hidden = np.minimum.reduceat(hidden, bounds_of(num_columns[segments.tile])[:-1])
    hidden = np.maximum(hidden, 0)
    return segments._replace(
        slot=segments.slot + hidden, num_tokens=segments.num_tokens - hidden, before=hidden
    ).only(hidden < segments.num_tokens)


def tile_sizes(group_heads: int, max_rows: int) -> list[int]:
    """Rows that tiles have: smallest, middle or largest; each size in use is one launch more.

    Args:
        group_heads: query heads of a KV head, which a tile has rows for at least.
        max_rows: rows of a tile at most, a power of two; more where one query has more heads.
    """
    max_rows = max(max_rows, 1 << (group_heads - 1).bit_length())
    sizes = {MIN_ROWS, 4 * MIN_ROWS, max_rows}
    return sorted(size for size in sizes if group_heads <= size <= max_rows)


def _num_rows(rows: np.ndarray, group_heads: int, max_rows: int) -> np.ndarray:
    """Rows of the smallest tiles that have so many."""
    sizes = np.array(tile_sizes(group_heads, max_rows))
    found: np.ndarray = sizes[np.searchsorted(sizes, rows)]
    return found
