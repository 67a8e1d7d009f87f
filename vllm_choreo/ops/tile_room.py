# SPDX-License-Identifier: Apache-2.0
"""Memory at fixed addresses for plans of tiles, from which CUDA graphs read.

A graph launches kernels over as many items and merged queries as there is room for: those that a
plan does not fill are empty, and write nothing::

    items of a size   | of the plan               | empty: a tile without queries     |
    merged queries    | of the plan     | empty: query -1                             |
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from vllm_choreo.ops.sending import padded, send
from vllm_choreo.ops.tile_arrays import TileArrays
from vllm_choreo.ops.tiles import TileClass, Tiles

# Pieces of spans, and segments of tiles, for each span: reading together, and sharing out what is
# long, cut spans.
_PIECES_PER_SPAN = 2
_OF_REQUESTS = (
    *("own_first_slot", "own_tokens", "own_position", "query_end"),
    *("merged_query", "merged_request", "merged_chosen"),
)
_OF_CLASSES = ("query", "request", "column", "items")


class TileRoom:
    """Room for the plans of steps in which each request has one query.

    A plan in which each request reads for itself, and nothing is split, always fits.

    Args:
        num_requests, num_spans: the most that a step has, own spans included.
        num_shares: by rows of tiles, the items that there may be beyond one for each request.
        group_heads: query heads of a KV head.
        num_partials: rows of partial results that there is room for.
        device: device of the plans.
    """

    def __init__(
        self,
        num_requests: int,
        num_spans: int,
        num_shares: Mapping[int, int],
        group_heads: int,
        num_partials: int,
        device: torch.device | str,
    ) -> None:
        self.num_requests, self.num_spans = num_requests, num_spans
        self._num_shares = dict(num_shares)
        num_slots = {rows: rows // group_heads for rows in num_shares}
        num_items = {rows: num_requests + shares for rows, shares in num_shares.items()}
        most = sum(num_items[rows] * num_slots[rows] for rows in num_shares)
        self._num_partials = min(num_partials, most)
        shapes: dict[tuple[str, int], tuple[int, ...]] = {
            ("segments", 0): (_PIECES_PER_SPAN * num_spans, 5),
            ("read_span", 0): (_PIECES_PER_SPAN * num_spans,),
            ("read_position", 0): (_PIECES_PER_SPAN * num_spans,),
            ("partial_start_loc", 0): (num_requests + 1,),
            ("partial", 0): (self._num_partials,),
            **{(name, 0): (num_requests,) for name in _OF_REQUESTS},
        }
        for rows in num_shares:
            # One tile more than there are items: the empty one.
            shape = num_items[rows] + 1, num_slots[rows]
            shapes |= {(name, rows): shape for name in _OF_CLASSES[:3]}
            shapes["items", rows] = (num_items[rows], 8)
        sizes = [padded(int(np.prod(shape))) for shape in shapes.values()]
        begins = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        self._places = {key: (at, shapes[key]) for key, at in zip(shapes, begins, strict=True)}
        self._empty: np.ndarray = np.zeros(sum(sizes), dtype=np.int32)
        self._in(self._empty, "merged_query")[:] = -1
        for rows in num_shares:
            self._in(self._empty, "query", rows)[:] = -1
            self._in(self._empty, "items", rows)[:] = num_items[rows], 0, 0, -1, 0, 0, -1, 0
        self._device = torch.device(device)
        self._buffer = send(self._empty.copy(), device)
        self.tiles = cache(self._tiles)

    @property
    def own_tokens(self) -> torch.Tensor:
        """Numbers of own tokens, int32 ``[num_requests]``, which whoever runs a step writes."""
        found: torch.Tensor = self.tiles(self.num_requests).own_tokens
        return found

    def fits(self, plan: TileArrays, num_requests: int) -> bool:
        """Return whether there is room for a plan where a graph is of so many requests."""
        if plan.num_partials > self._num_partials:
            return False
        for name, array in plan.common.items():
            most = num_requests if name in _OF_REQUESTS else self._places[name, 0][1][0]
            if len(array) > most:
                return False
        return all(
            len(one.items) <= num_requests + self._num_shares.get(one.num_rows, -num_requests)
            for one in plan.classes
        )

    def put(self, plan: TileArrays) -> None:
        """Have graphs that are replayed from now on read a plan, which fits.

        Numbers of own tokens are those of the plan until somebody writes others.
        """
        host = self._empty.copy()
        for name, array in plan.common.items():
            self._in(host, name)[: len(array)] = array
        # Queries that are not there have no partial results.
        starts = self._in(host, "partial_start_loc")
        starts[len(plan.common["partial_start_loc"]) :] = len(plan.common["partial"])
        for one in plan.classes:
            for name in _OF_CLASSES:
                array = getattr(one, name)
                self._in(host, name, one.num_rows)[: len(array)] = array
        self._buffer.copy_(send(host, self._device))

    def _tiles(self, num_requests: int) -> Tiles:
        """Plan as a graph of so many requests reads it; the same object for the same number."""

        def tensor(name: str, rows: int = 0) -> torch.Tensor:
            begin, shape = self._places[name, rows]
            return self._buffer[begin : begin + int(np.prod(shape))].view(shape)

        classes = tuple(
            TileClass(
                num_rows=rows,
                query=tensor("query", rows),
                request=tensor("request", rows),
                column=tensor("column", rows),
                items=tensor("items", rows)[: num_requests + shares],
            )
            for rows, shares in self._num_shares.items()
        )
        common = {name: tensor(name, rows) for name, rows in self._places if not rows}
        common["merged_query"] = common["merged_query"][:num_requests]
        return Tiles(classes=classes, num_partials=self._num_partials, **common)

    def _in(self, host: np.ndarray, name: str, rows: int = 0) -> np.ndarray:
        """Part of a copy of the buffer in host memory."""
        begin, shape = self._places[name, rows]
        return host[begin : begin + int(np.prod(shape))].reshape(shape)
