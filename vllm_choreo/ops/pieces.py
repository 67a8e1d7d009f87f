# SPDX-License-Identifier: Apache-2.0
"""Pieces of spans, cut where their readers change: found by the blocks in which the spans lie.

Most spans are messages that others read as a whole, or nobody. Their blocks are compared once with
those of the first span that looks the same. What is left shares blocks with spans that differ from
it (sub-spans, repaired messages), and is cut block by block::

    a span        | block 3      | block 4      | block 7      | block 8   |
    another               | block 4      | block 7      | block 9      |
    pieces        |              |        4 and 7              |           |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_choreo.ops.ragged import any_of, entries_of
from vllm_choreo.ops.spans import SpanBatch


class Reads(NamedTuple):
    """Reads of pieces by spans, in the order of spans and of their tokens. All are int64.

    Attributes:
        span, begin: ``[num_reads]``, the piece begins at this token of this span.
        num_tokens: ``[num_reads]``, tokens of the piece.
        piece: ``[num_reads]``, index of the first read of the same piece.
    """

    span: np.ndarray
    begin: np.ndarray
    num_tokens: np.ndarray
    piece: np.ndarray


class _Blocks(NamedTuple):
    """Parts of spans, each in one block, span by span. All but the size are int64.

    Attributes:
        span: ``[num_parts]``, which of the spans, counted from 0.
        number: ``[num_parts]``, number of the part in its span.
        block: ``[num_parts]``, id of the block.
        first: ``[num_spans]``, slot in its first block at which a span begins.
        num_tokens: ``[num_spans]``, tokens of a span.
        size: slots of a block.
    """

    span: np.ndarray
    number: np.ndarray
    block: np.ndarray
    first: np.ndarray
    num_tokens: np.ndarray
    size: int


def whole_reads(batch: SpanBatch, spans: np.ndarray) -> Reads:
    """Reads of spans that nobody shares: each is a piece."""
    num_tokens = batch.num_tokens.numpy()[spans].astype(np.int64)
    return Reads(spans, np.zeros_like(spans), num_tokens, np.arange(len(spans)))


def cut_reads(batch: SpanBatch, spans: np.ndarray, request: np.ndarray) -> Reads:
    """Reads of the pieces into which spans are cut.

    Args:
        batch: batch in host memory.
        spans: int64, numbers of the spans, ascending.
        request: int64 ``[num_spans]``, request of each span of the batch.
    """
    if not len(spans):
        return whole_reads(batch, spans)
    parts = _blocks_of(batch, spans, request)
    same, is_cut = _compare(parts)
    is_first = parts.number == 0
    chosen = np.flatnonzero(is_cut[parts.span])
    if len(chosen):
        same[chosen], is_first[chosen] = _cut(parts, chosen)
    begins = np.flatnonzero(is_first)
    span = parts.span[begins]
    begin = np.maximum(parts.number[begins] * parts.size - parts.first[span], 0)
    end = parts.num_tokens[span]
    is_inside = span[1:] == span[:-1]
    end[:-1][is_inside] = begin[1:][is_inside]
    piece = (np.cumsum(is_first) - 1)[same[begins]]
    return Reads(spans[span], begin, end - begin, piece)


def _blocks_of(batch: SpanBatch, spans: np.ndarray, request: np.ndarray) -> _Blocks:
    size, table = batch.block_size, batch.block_table.numpy()
    slot, num_tokens = (
        column.numpy()[spans].astype(np.int64) for column in (batch.first_slot, batch.num_tokens)
    )
    column, first = np.divmod(slot, size)
    span, index = entries_of((first + num_tokens - 1) // size + 1)
    in_table = (request[spans] * table.shape[1] + column)[span] + index
    block = table.reshape(-1)[in_table].astype(np.int64)
    return _Blocks(span, index, block, first, num_tokens, size)


def _compare(parts: _Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Compare spans as a whole.

    Returns:
        of each part, int64, the first one that has the same slots, if its span need not be cut;
        of each span, bool, whether it must be: it has a block with a span that differs from it.
    """
    num_spans, begins = len(parts.first), np.flatnonzero(parts.number == 0)
    # Below 2**63 for blocks of 1,024 slots and spans of millions of tokens.
    look = parts.block[begins] * parts.size + parts.first
    look = look * (parts.num_tokens.max() + 1) + parts.num_tokens
    _, first, inverse = np.unique(look, return_index=True, return_inverse=True)
    twin = first[inverse]
    is_other = parts.block != parts.block[begins[twin][parts.span] + parts.number]
    differs = any_of(is_other, parts.span, num_spans)
    twin[differs] = np.flatnonzero(differs)
    # A block has one owner among spans that differ; others that come upon it find another one.
    twins = twin[parts.span]
    owner: np.ndarray = np.empty(int(parts.block.max()) + 1, dtype=np.int64)
    owner[parts.block] = twins
    is_contested: np.ndarray = np.zeros(len(owner), dtype=bool)
    is_contested[parts.block[owner[parts.block] != twins]] = True
    is_cut = any_of(is_contested[parts.block], parts.span, num_spans)
    return begins[twins] + parts.number, is_cut


def _cut(parts: _Blocks, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans block by block.

    Two blocks stay together if whoever reads one of them reads the other one right behind it.

    Args:
        chosen: int64 ``[num_chosen]``, parts of the spans to cut, all of each.

    Returns:
        int64, of each such part the first one that has the same slots of the same block; bool,
        whether a piece begins with it.
    """
    span, index = parts.span[chosen], parts.number[chosen]
    begin = parts.first[span] - index * parts.size
    end = np.minimum(begin + parts.num_tokens[span], parts.size)
    slots = (parts.block[chosen] * parts.size + np.maximum(begin, 0)) * (parts.size + 1) + end
    _, first, cut, num_readers = np.unique(
        slots, return_index=True, return_inverse=True, return_counts=True
    )
    pair = cut[:-1] * len(first) + cut[1:]
    pair[index[1:] == 0] = -1  # of two spans
    _, which, num_pairs = np.unique(pair, return_inverse=True, return_counts=True)
    num_readers, num_pairs = num_readers[cut], num_pairs[which]
    goes_on = (num_pairs == num_readers[:-1]) & (num_pairs == num_readers[1:]) & (pair >= 0)
    is_first: np.ndarray = np.ones(len(chosen), dtype=bool)
    is_first[1:] = ~goes_on
    return chosen[first[cut]], is_first
