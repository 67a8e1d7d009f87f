# SPDX-License-Identifier: Apache-2.0
"""Long prefills by FlashAttention, which knows no spans: one sequence for each span of a request.

The last requests of a batch, if they have many queries, are taken out of its tiles. Their queries
are copied for each parent, rotated to it, and attend to that parent alone; as they are they attend
to the request's own tokens, causally; and the partial results are merged by their log-sum-exp::

    request   queries 0 .. n-1, spans A, B, own
    copies    queries for A | queries for B            FlashAttention, all keys
    queries   queries                                  FlashAttention, causal
    partial   rows of A     | rows of B     | own rows merged by query

A *round* has as many queries as there is memory for copies and partial results. FlashAttention:
Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_choreo.ops.ragged import bounds_of, entries_of
from vllm_choreo.ops.sending import send_all
from vllm_choreo.ops.spans import SpanBatch

# Requests with fewer queries in a step are read by tiles: there is too little to fill a GPU with.
MIN_QUERIES = 512
# A copy of a query is written and read, and so is its partial result: with 32 heads of 128 in 16
# bits 40 KiB, 8.5 ns at the 4.8 TB/s of an H200. Against a token FlashAttention 3 takes 0.03 ns at
# 550 TFLOP/s (arXiv 2407.08608), our tiles 0.09 at 180 (estimated): below some 140 tokens copies
# cost more than they save.
MIN_SPAN_TOKENS = 256
# Rows of FlashAttention's tiles, below which a round's part of a request is not worth a sequence.
_MIN_PART = 128


class FlashAttention(Protocol):
    """vLLM's `flash_attn_varlen_func` over a paged cache, of one version."""

    def __call__(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        return_softmax_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; return the output and the log-sum-exps, float32 ``[num_heads, num_queries]``."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of queries, each of which reads a paged run of keys. Tensors are int32.

    Attributes:
        query_start_loc: ``[n + 1]``, first query of each.
        num_tokens: ``[n]``, keys of each.
        block_table: ``[n, max_blocks]``, blocks of the keys, of which the first begins with the
            first key.
        max_queries, max_tokens: the most that a sequence has.
    """

    query_start_loc: torch.Tensor
    num_tokens: torch.Tensor
    block_table: torch.Tensor
    max_queries: int
    max_tokens: int


@dataclass(frozen=True, eq=False)
class PrefillRound:
    """Queries of a batch, one behind the other, that are run together. Tensors are int32.

    Attributes:
        first_query, end_query: the queries.
        copied_query, copied_span: ``[num_copies]``, the query that each copy is of, and the span to
            which it is rotated.
        parents: sequences of copies; None: there are none.
        own: sequences of the queries themselves.
        merged_query: ``[num_queries]``, the queries.
        partial_start_loc: ``[num_queries + 1]``, and
        partial: the rows of their partial results: of the copies, then of the queries.
    """

    first_query: int
    end_query: int
    copied_query: torch.Tensor
    copied_span: torch.Tensor
    parents: Sequences | None
    own: Sequences
    merged_query: torch.Tensor
    partial_start_loc: torch.Tensor
    partial: torch.Tensor

    @property
    def num_copies(self) -> int:
        """Number of copies of queries."""
        return self.copied_query.numel()

    @property
    def num_rows(self) -> int:
        """Number of partial results."""
        return self.num_copies + self.end_query - self.first_query


@dataclass(frozen=True, eq=False)
class FlashPrefills:
    """Last requests of a batch, which FlashAttention runs.

    Attributes:
        attention: FlashAttention.
        first_request: number of the first of them.
        rounds: run one after the other.
    """

    attention: FlashAttention
    first_request: int
    rounds: Sequence[PrefillRound]

    def rest_of(self, batch: SpanBatch) -> SpanBatch:
        """The batch in which these requests have no queries."""
        starts = batch.query_start_loc
        starts = starts.clamp(max=int(starts[self.first_request]))
        return dataclasses.replace(batch, query_start_loc=starts)


def prefill_row_bytes(num_heads: int, head_size: int, itemsize: int) -> int:
    """Bytes of a copied query, its partial output and its log-sum-exp."""
    return num_heads * (2 * head_size * itemsize + 4)


def first_prefill(batch: SpanBatch, max_rows: int) -> int:
    """Number of the first of the last requests that FlashAttention is to run.

    Those have many queries, and parents that are long in the mean and begin with a block.

    Args:
        batch: spans whose tensors lie in host memory, but for the block table, which is not used.
        max_rows: partial results that there is room for.

    Returns:
        The number of requests if there are none.
    """
    if int(batch.query_start_loc[-1]) < MIN_QUERIES:
        return batch.num_reqs
    spans, num_tokens = batch.span_start_loc.numpy(), batch.num_tokens.numpy()
    num_parents = np.diff(spans) - 1
    num_parent_tokens = np.add.reduceat(num_tokens, spans[:-1]) - num_tokens[spans[1:] - 1]
    begins_inside = batch.first_slot.numpy() % batch.block_size != 0
    is_long = np.diff(batch.query_start_loc.numpy()) >= MIN_QUERIES
    is_long &= num_parent_tokens >= MIN_SPAN_TOKENS * num_parents
    is_long &= _MIN_PART * (num_parents + 1) <= max_rows
    is_long &= ~np.logical_or.reduceat(begins_inside, spans[:-1])
    if batch.reweighting is not None:
        is_chosen = batch.reweighting.is_chosen.numpy() != 0
        is_long &= ~np.logical_or.reduceat(is_chosen, spans[:-1])
    others = np.flatnonzero(~is_long)
    return int(others[-1]) + 1 if len(others) else 0


def plan_prefills(
    batch: SpanBatch,
    first_request: int,
    attention: FlashAttention,
    own_tokens: torch.Tensor,
    max_rows: int,
) -> FlashPrefills:
    """Plan the last requests of a batch for FlashAttention. Waits for no device.

    Args:
        batch: spans whose tensors lie in host memory, but for the block table; own spans may be
            longer there than they are.
        first_request: see `first_prefill`.
        own_tokens: int32 ``[num_reqs]``, tokens of own spans, on the device of the block table.
        max_rows: partial results of a round at most.
    """
    rounds = _rounds(batch, first_request, max_rows)
    found = [_round(batch, parts, own_tokens) for parts in rounds]
    return FlashPrefills(attention, first_request, found)


class _Part(NamedTuple):
    """Queries of a request that are in one round."""

    request: int
    first_query: int
    num_queries: int


def _rounds(batch: SpanBatch, first_request: int, max_rows: int) -> Iterator[list[_Part]]:
    """Share out the queries: each takes a row for every span of its request."""
    parts: list[_Part] = []
    room = max_rows
    starts, widths = batch.query_start_loc.tolist(), batch.span_start_loc.diff().tolist()
    for request in range(first_request, batch.num_reqs):
        query, end = starts[request], starts[request + 1]
        while query < end:
            num_queries = min(end - query, room // widths[request])
            if parts and num_queries < min(end - query, _MIN_PART):
                yield parts
                parts, room = [], max_rows
                continue
            parts.append(_Part(request, query, num_queries))
            query += num_queries
            room -= num_queries * widths[request]
    if parts:
        yield parts


def _round(batch: SpanBatch, parts: Sequence[_Part], own_tokens: torch.Tensor) -> PrefillRound:
    request, first_query, num_queries = np.array(parts, dtype=np.int64).T
    end_query, of_part = first_query + num_queries, bounds_of(num_queries)
    spans, ends = batch.span_start_loc.numpy(), batch.query_start_loc.numpy()[1:]
    own = spans[1:][request] - 1
    num_parents = own - spans[request]
    # A sequence for each parent of each part.
    part, index = entries_of(num_parents)
    parent, of_sequence = spans[request[part]] + index, bounds_of(num_queries[part])
    sequence, copied = entries_of(num_queries[part])
    # Of each query a row in each sequence of its part, then its own.
    part_of_query, place = entries_of(num_queries)
    num_rows = num_parents[part_of_query] + 1
    query, number = entries_of(num_rows)
    row = of_sequence[bounds_of(num_parents)[part_of_query[query]] + number] + place[query]
    row = np.where(number == num_rows[query] - 1, of_sequence[-1] + query, row)
    block, tokens = batch.first_slot.numpy() // batch.block_size, batch.num_tokens.numpy()
    sent = send_all(
        [
            *(request[part], block[parent], of_sequence, tokens[parent]),
            *(request, block[own], of_part, ends[request] - end_query),
            *(first_query[part[sequence]] + copied, parent[sequence]),
            *(np.arange(first_query[0], end_query[-1]), bounds_of(num_rows), row),
        ],
        batch.block_table.device,
    )
    reader, first_block, start_loc, num_tokens = (next(sent) for _ in range(4))
    parents = None
    if len(parent):
        blocks = _blocks(batch, reader, first_block, int(tokens[parent].max()))
        most = int(num_queries[part].max()), int(tokens[parent].max())
        parents = Sequences(start_loc, num_tokens, blocks, *most)
    reader, first_block, start_loc, behind = (next(sent) for _ in range(4))
    blocks = _blocks(batch, reader, first_block, int(tokens[own].max()))
    # What lies behind the last query of a part its queries do not see.
    num_tokens = own_tokens[reader.long()] - behind
    most = int(num_queries.max()), int(tokens[own].max())
    of_queries = Sequences(start_loc, num_tokens, blocks, *most)
    bounds = int(first_query[0]), int(end_query[-1])
    return PrefillRound(*bounds, *(next(sent), next(sent)), parents, of_queries, *sent)


def _blocks(
    batch: SpanBatch, reader: torch.Tensor, first_block: torch.Tensor, max_tokens: int
) -> torch.Tensor:
    """Blocks of runs of keys: int32 ``[num_runs, max_blocks]``; beyond a run's end, any.

    Args:
        reader: the request in whose row of the block table each run lies.
        first_block: column of each run's first block.
    """
    columns = torch.arange(-(-max_tokens // batch.block_size), device=reader.device)
    columns = (first_block[:, None] + columns).clamp(max=batch.block_table.shape[1] - 1)
    return batch.block_table[reader[:, None].long(), columns]
