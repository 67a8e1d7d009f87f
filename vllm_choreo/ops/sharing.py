# SPDX-License-Identifier: Apache-2.0
"""Shared reads: tokens that several requests of a batch attend to are read together.

Decoding is bound by reading keys and values. Where several requests attend to the same message,
also at different positions, its keys and values are read once for all of them: each reader's
queries are rotated for its own span, and the partial results are merged by their log-sum-exp
(Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018). vLLM's cascade attention
and FlashInfer's do so for a common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from vllm_choreo.ops.pieces import Reads, cut_reads, whole_reads
from vllm_choreo.ops.ragged import bounds_of
from vllm_choreo.ops.spans import SpanBatch, ints

# Fewer tokens than this in common are read by each request alone: a partial result and its merge
# cost something. Time alone / together of a decode step, 2, 4, 16 readers with 200 tokens of their
# own, Zen 5, one thread, fastest tenth of interleaved calls on a busy machine (3 % either way):
#   tokens in common      16               32               64               128
#   9 / 3 heads of 64     1.00 0.97 0.99   0.94 0.99 0.96   1.01 1.02 0.96   0.96 1.06 1.00
#   32 / 8 heads of 128   1.01 0.97 0.99   1.02 1.00 0.87   1.02 1.03 0.90   1.16 1.10 1.09
MIN_SHARED_TOKENS = 64
# Requests with more queries than this in a step read for themselves: their own queries fill tiles,
# so keys and values are read about as seldom, and every query would leave a partial result. Time
# alone / together, 4 readers of 1,000 tokens, measured alike:
#   queries of each           1        4        8        16       128
#   9 / 3 heads of 64         1.46     1.01     0.98     0.94     0.76
#   32 / 8 heads of 128       1.63     1.04     0.91     1.02     0.93
# Kernels on GPUs are bound by reading for longer; drafts of speculation stay below.
MAX_SHARED_QUERIES = 8
# On GPUs, of a layer's keys and values in a step. Reading together takes more launches, one behind
# the other: about 20 µs. Time alone / together of a decode step on an H200, bfloat16, 32 / 8 heads
# of 128 (`benchmarks/results/gpu_attention.csv`):
#   readers x tokens      8 x 500   4 x 2000   64 x 500   16 x 8000   64 x 4000   16 x 32000
#   MiB saved             14        23         123        469         984         1875
#   time                  0.62      1.04       0.87       2.00        3.42        4.65
MIN_SAVED_BYTES = 128 * 2**20
# Of all partial results of a layer. 256 decoding requests of 32 heads of size 128 may each be
# members of 13 groups.
PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class SharedReads:
    """Groups of requests (members) and the pieces of spans that they read together.

    Group ``r`` below ``num_reqs`` is request ``r`` alone: the pieces that nobody else reads, and
    after them, not listed here because it grows, its own span. Other groups have two members
    or more; a request that reads the same tokens at two positions is a member twice. The last
    groups, from ``first_chosen`` on, have one member, and the spans of it that count by other
    weights (``Reweighting``): they are read alone. Every token
    of every parent span lies in exactly one piece per span. All tensors are int32::

        group g   members   member_req[member_start_loc[g] : member_start_loc[g + 1]]
                  pieces    piece_tokens[piece_start_loc[g] : piece_start_loc[g + 1]]
                  reads     [pieces, members] from read_start_loc[g] on: the piece begins at token
                            read_begin of span read_span, which is a span of the member

    Attributes:
        member_start_loc, piece_start_loc, read_start_loc: ``[num_groups + 1]``.
        member_req: ``[num_members]``, the request.
        piece_tokens: ``[num_pieces]``, at least 1.
        read_span, read_begin: ``[num_reads]``.
        first_chosen: number of the first group of spans that count by other weights; ``num_groups``
            if there is none.
    """

    member_start_loc: torch.Tensor
    member_req: torch.Tensor
    piece_start_loc: torch.Tensor
    piece_tokens: torch.Tensor
    read_start_loc: torch.Tensor
    read_span: torch.Tensor
    read_begin: torch.Tensor
    first_chosen: int

    @property
    def num_groups(self) -> int:
        """Number of groups, those of single requests included."""
        return self.member_start_loc.numel() - 1

    def groups(self) -> list[Group]:
        """Groups as lists, for reading and for the reference implementation."""
        members, pieces, reads = (
            ints(t) for t in (self.member_start_loc, self.piece_start_loc, self.read_start_loc)
        )
        requests, tokens = ints(self.member_req), ints(self.piece_tokens)
        begins = list(zip(ints(self.read_span), ints(self.read_begin), strict=True))
        found = []
        for g in range(self.num_groups):
            of_group = tuple(requests[members[g] : members[g + 1]])
            width = len(of_group)
            listed = [
                SharedPiece(
                    num_tokens, tuple(begins[reads[g] + i * width : reads[g] + (i + 1) * width])
                )
                for i, num_tokens in enumerate(tokens[pieces[g] : pieces[g + 1]])
            ]
            found.append(Group(of_group, listed))
        return found


@dataclass(frozen=True)
class SharedPiece:
    """Tokens that the members of a group read: ``(span, first token in it)`` per member."""

    num_tokens: int
    reads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """One group of ``SharedReads``: its members' requests, and the pieces that they read."""

    members: tuple[int, ...]
    pieces: list[SharedPiece]


def partial_row_bytes(num_heads: int, head_size: int) -> int:
    """Bytes of a partial result of a query in all heads, whatever the implementation.

    In float32: an output, maximum and sum or log-sum-exp, and the rounding up to cache lines.
    """
    return 4 * num_heads * (head_size + 17)


def counted_queries(query_start_loc: torch.Tensor) -> np.ndarray:
    """Number of queries of each request that may read with others; 0: the request reads alone.

    The count of a decoding request is exact, others are rounded up: as long as the counts stay the
    same, so does the plan.

    Args:
        query_start_loc: int32 ``[num_reqs + 1]``, in host memory.

    Returns:
        int32 ``[num_reqs]``.
    """
    counts = np.diff(query_start_loc.numpy())
    counts[counts > MAX_SHARED_QUERIES] = 0
    counts[counts > 1] = MAX_SHARED_QUERIES
    return counts


def plan_shared_reads(
    batch: SpanBatch,
    max_partials: int | None = None,
    min_tokens: int = MIN_SHARED_TOKENS,
    min_saved: int = 0,
) -> SharedReads | None:
    """Find the tokens that requests of a batch read in common, from the block table alone.

    Valid for as long as the block table's parents, the parents' spans and the `counted_queries`
    stay the same; own spans may grow.

    Args:
        batch: batch in host memory.
        max_partials: partial results, of a query in all heads each, that reading together may
            leave; the groups that pay least are dropped.
        min_tokens: tokens that readers must have in common to read together.
        min_saved: tokens that reading together must save in all, else nobody does.

    Returns:
        The groups; None if no two spans have enough tokens in common, or none may be grouped, and
        all count alike.
    """
    counts = counted_queries(batch.query_start_loc)
    parents, chosen, request = _parents(batch)
    may_share = counts[request[parents]] > 0
    reads = cut_reads(batch, parents[may_share], request)
    groups = _grouped(reads, request)
    kept = [g for g, num_tokens in enumerate(groups.num_tokens) if num_tokens >= min_tokens]
    if max_partials is not None:
        kept = _within_cap(groups, kept, counts.tolist(), max_partials)
    if sum(groups.num_tokens[g] * (len(groups.members[g]) - 1) for g in kept) < min_saved:
        kept = []
    if not kept and not len(chosen):
        return None
    groups = groups.only(kept)
    is_alone: np.ndarray = np.ones(len(reads.span), dtype=bool)
    is_alone[groups.read] = False
    whole = whole_reads(batch, parents[~may_share])
    alone = [np.concatenate([x[is_alone], y]) for x, y in zip(reads, whole, strict=True)]
    order = np.argsort(alone[0], kind="stable")
    return _flatten(batch, Reads(*(x[order] for x in alone)), chosen, request, reads, groups)


def check_reads(batch: SpanBatch, reads: SharedReads | None) -> None:
    """Check that spans that count by other weights have a plan of reads, or raise a ValueError."""
    given = batch.reweighting
    if reads is None and given is not None and bool(given.is_chosen.any()):
        raise ValueError("spans that count by other weights need reads: see plan_shared_reads")


def _parents(batch: SpanBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parent spans that count as they are, and by other weights; the request of every span."""
    span_start = batch.span_start_loc.numpy()
    is_chosen: np.ndarray = np.zeros(batch.num_spans, dtype=bool)
    if batch.reweighting is not None:
        is_chosen = batch.reweighting.is_chosen.numpy() != 0
    is_plain = ~is_chosen
    is_plain[span_start[1:] - 1] = False
    request: np.ndarray = np.repeat(np.arange(batch.num_reqs), np.diff(span_start))
    return np.flatnonzero(is_plain), np.flatnonzero(is_chosen), request


class _Groups(NamedTuple):
    """Groups of several readers, by the first reads of their pieces.

    Attributes:
        members: request of each member, by group.
        num_tokens: tokens that the members have in common, by group.
        read: int64 ``[num_reads]``, indices of reads, in the order of groups, pieces and members.
        group: int64 ``[num_reads]``, group of each.
    """

    members: list[list[int]]
    num_tokens: list[int]
    read: np.ndarray
    group: np.ndarray

    def only(self, kept: Sequence[int]) -> _Groups:
        """Some of the groups, by their numbers, ascending."""
        number = np.full(len(self.members), -1)
        number[kept] = np.arange(len(kept))
        group = number[self.group]
        members = [self.members[g] for g in kept]
        num_tokens = [self.num_tokens[g] for g in kept]
        return _Groups(members, num_tokens, self.read[group >= 0], group[group >= 0])


def _grouped(reads: Reads, request: np.ndarray) -> _Groups:
    """Group the pieces that the same requests read, as often."""
    num_readers = np.bincount(reads.piece, minlength=len(reads.piece))
    read = np.flatnonzero(num_readers[reads.piece] > 1)
    read = read[np.argsort(reads.piece[read], kind="stable")]
    first = np.flatnonzero(reads.piece[read] == read)
    readers = request[reads.span[read]]
    raw, ends = readers.tobytes(), [*(readers.itemsize * first).tolist(), readers.nbytes]
    numbers: dict[bytes, int] = {}
    of_piece = [numbers.setdefault(raw[a:b], len(numbers)) for a, b in pairwise(ends)]
    num_tokens: np.ndarray = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(num_tokens, of_piece, reads.num_tokens[read[first]])
    group: np.ndarray = np.repeat(np.array(of_piece, dtype=np.int64), num_readers[read[first]])
    order = np.argsort(group, kind="stable")
    members = [np.frombuffer(key, dtype=readers.dtype).tolist() for key in numbers]
    return _Groups(members, num_tokens.tolist(), read[order], group[order])


def _within_cap(
    groups: _Groups, kept: Sequence[int], counts: Sequence[int], max_partials: int
) -> list[int]:
    """Groups that may read together: with all of `kept`, partial results may exceed the cap.

    Args:
        counts: queries of each request, by `counted_queries`.
    """
    rows = {g: sum(counts[r] for r in groups.members[g]) for g in kept}

    def order(g: int) -> tuple[float, list[int]]:
        # Tokens that are not read again, for each partial result.
        members = groups.members[g]
        return -groups.num_tokens[g] * (len(members) - 1) / rows[g], members

    found, grouped, total = [], set[int](), 0
    for g in sorted(kept, key=order):
        # Requests that are in a group at all leave one more, of what they read alone.
        new = set(groups.members[g]) - grouped
        added = rows[g] + sum(counts[r] for r in new)
        if total + added <= max_partials:
            found.append(g)
            total, grouped = total + added, grouped | new
    return sorted(found)


def _flatten(
    batch: SpanBatch,
    alone: Reads,
    chosen: np.ndarray,
    request: np.ndarray,
    reads: Reads,
    groups: _Groups,
) -> SharedReads:
    """Lay out single requests, then groups, then spans that count by other weights."""
    shared = Reads(*(column[groups.read] for column in reads))
    apart, of_chosen = np.unique(request[chosen], return_inverse=True)
    last = whole_reads(batch, chosen)
    span, begin, num_tokens, _ = map(np.concatenate, zip(alone, shared, last, strict=True))
    first_chosen = batch.num_reqs + len(groups.members)
    num_groups = first_chosen + len(apart)
    group: np.ndarray = np.concatenate(
        [request[alone.span], batch.num_reqs + groups.group, first_chosen + of_chosen]
    )
    is_first: np.ndarray = np.ones(len(span), dtype=bool)  # of the reads of its piece
    is_first[len(alone.span) :][: len(groups.read)] = shared.piece == groups.read
    members = [*range(batch.num_reqs), *(r for of_group in groups.members for r in of_group)]
    lengths = [1] * batch.num_reqs + [len(m) for m in groups.members] + [1] * len(apart)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32))

    def starts(of_group: np.ndarray) -> torch.Tensor:
        return tensor(bounds_of(np.bincount(of_group, minlength=num_groups)))

    return SharedReads(
        member_start_loc=tensor(bounds_of(np.array(lengths))),
        member_req=tensor(np.concatenate([members, apart])),
        piece_start_loc=starts(group[is_first]),
        piece_tokens=tensor(num_tokens[is_first]),
        read_start_loc=starts(group),
        read_span=tensor(span),
        read_begin=tensor(begin),
        first_chosen=first_chosen,
    )
