# SPDX-License-Identifier: Apache-2.0
"""Tiles of queries and items of tokens, into which an attention call is cut for a GPU.

A *tile* is some queries of a group of readers (see ``SharedReads``) and all tokens that the group
reads; its rows are the query heads of one KV head. An *item* is a share of a tile's tokens, the
work of one program per KV head. Where the queries of a tile have several partial results they are
merged by their log-sum-exp::

    tile      rows     slot 0 (query, heads 0 .. G-1), slot 1 (query, heads 0 .. G-1), ...
              tokens   segment | segment | segment | own tokens of the tile's one request
    items     |---- 0 ----|---- 1 ----|---- 2 ----|
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

# Rows of the tensor cores' smallest product.
MIN_ROWS = 16
# Fewer tokens than this are not worth a partial result and its merge.
MIN_SPLIT_TOKENS = 256


@dataclass(frozen=True, eq=False)
class TileClass:
    """Tiles of one size, and their items: one kernel launch. All tensors are int32.

    Attributes:
        num_rows: rows of each tile, a power of two, at least ``MIN_ROWS``.
        query: ``[num_tiles, num_rows // group_heads]``, index of the query token; -1: no query.
        request: same shape, the request of the query.
        column: same shape, index of the member of its group that the query belongs to.
        items: ``[num_items, 8]``: tile; first and end segment; the request whose own tokens
            belong to the item, or -1; which share of them, of how many shares; first row of its
            partial results, or -1 where it writes the output itself; 1 where its spans count by
            other weights (see ``Reweighting``).
    """

    num_rows: int
    query: torch.Tensor
    request: torch.Tensor
    column: torch.Tensor
    items: torch.Tensor


@dataclass(frozen=True, eq=False)
class Tiles:
    """Plan of one call. All tensors are int32 and lie on the device of the call.

    Valid for as long as queries, parents and reads of the batch stay the same; own spans may
    grow, see ``with_own_tokens``.

    Attributes:
        classes: the tiles by size.
        segments: ``[num_segments, 5]``: index into ``read_span`` of the first member's read; the
            request whose row of the block table has the blocks; first slot there; number of
            tokens; how many tokens of the piece precede.
        read_span: ``[num_reads]``, the span through which a member reads a piece.
        read_position: ``[num_reads]``, position at which the member sees the piece's first token.
        own_first_slot, own_tokens, own_position: ``[num_reqs]``, first slot, number of tokens and
            stored position of the own spans.
        query_end: ``[num_reqs]``, end of the request's queries.
        merged_query: ``[num_merged]``, queries with partial results.
        partial_start_loc: ``[num_merged + 1]``, and
        partial: their rows of partial results, those that count by other weights first.
        merged_request: ``[num_merged]``, the request of each of these queries.
        merged_chosen: ``[num_merged]``, how many of the rows count by other weights.
        num_partials: rows of partial results.
        launches: by the looks of plans, what these have in common, and by the looks of layers what
            the first one laid out for those after it, and for later steps.
    """

    classes: tuple[TileClass, ...]
    segments: torch.Tensor
    read_span: torch.Tensor
    read_position: torch.Tensor
    own_first_slot: torch.Tensor
    own_tokens: torch.Tensor
    own_position: torch.Tensor
    query_end: torch.Tensor
    merged_query: torch.Tensor
    partial_start_loc: torch.Tensor
    partial: torch.Tensor
    merged_request: torch.Tensor
    merged_chosen: torch.Tensor
    num_partials: int
    launches: dict[object, tuple[object, dict[object, Any]]] = field(default_factory=dict)

    def with_own_tokens(self, own_tokens: torch.Tensor) -> Tiles:
        """Copy the plan for own spans of other lengths (int32 ``[num_reqs]``, on the device)."""
        return dataclasses.replace(self, own_tokens=own_tokens)
