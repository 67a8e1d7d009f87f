# SPDX-License-Identifier: Apache-2.0
"""Shared reads: tokens that several requests of a batch attend to are read together.

Decoding is bound by reading keys and values. Where several requests attend to the same message,
also at different positions, its keys and values are read once for all of them: each reader's
queries are rotated for its own span, and the partial results are merged by their log-sum-exp
(Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018). vLLM's cascade attention
and FlashInfer's do so for a common prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

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


def counted_queries(query_start_loc: torch.Tensor) -> list[int]:
    """Number of queries of each request that may read with others; 0: the request reads alone.

    The count of a decoding request is exact, others are rounded up: as long as the counts stay the
    same, so does the plan.
    """
    counts = ints(query_start_loc.diff())
    return [0 if n > MAX_SHARED_QUERIES else n if n <= 1 else MAX_SHARED_QUERIES for n in counts]


def plan_shared_reads(
    batch: SpanBatch, max_partials: int | None = None, min_tokens: int = MIN_SHARED_TOKENS
) -> SharedReads | None:
    """Find the tokens that requests of a batch read in common, from the block table alone.

    Valid for as long as the block table's parents, the parents' spans and the `counted_queries`
    stay the same; own spans may grow.

    Args:
        batch: batch in host memory.
        max_partials: partial results, of a query in all heads each, that reading together may
            leave; the groups that pay least are dropped.
        min_tokens: tokens that readers must have in common to read together.

    Returns:
        The groups; None if no two spans have enough tokens in common, or none may be grouped, and
        all count alike.
    """
    counts = counted_queries(batch.query_start_loc)
    request_of = _parent_spans(batch)
    alone: list[list[SharedPiece]] = [[] for _ in range(batch.num_reqs)]
    num_tokens = ints(batch.num_tokens)
    chosen = _chosen(batch, request_of)
    request_of = {j: r for j, r in request_of.items() if j not in chosen}
    for j in [j for j, r in request_of.items() if not counts[r]]:
        alone[request_of[j]].append(SharedPiece(num_tokens[j], ((j, 0),)))
    request_of = {j: r for j, r in request_of.items() if counts[r]}
    shared: dict[tuple[int, ...], list[SharedPiece]] = {}
    for piece in _pieces(batch, request_of):
        readers = tuple(request_of[span] for span, _ in piece.reads)
        if len(readers) > 1:
            shared.setdefault(readers, []).append(piece)
        else:
            alone[readers[0]].append(piece)
    sizes = {readers: sum(p.num_tokens for p in pieces) for readers, pieces in shared.items()}
    dropped = {readers for readers, size in sizes.items() if size < min_tokens}
    if max_partials is not None:
        paying = {readers: sizes[readers] for readers in sizes.keys() - dropped}
        dropped |= _beyond_cap(paying, counts, max_partials)
    for readers in dropped:
        for piece in shared.pop(readers):
            for request, read in zip(readers, piece.reads, strict=True):
                alone[request].append(SharedPiece(piece.num_tokens, (read,)))
    if not shared and not chosen:
        return None
    singles = [Group((r,), pieces) for r, pieces in enumerate(alone)]
    groups = [*singles, *(Group(*item) for item in shared.items())]
    by_request: dict[int, list[SharedPiece]] = {}
    for j, r in chosen.items():
        by_request.setdefault(r, []).append(SharedPiece(num_tokens[j], ((j, 0),)))
    last = [Group((r,), pieces) for r, pieces in by_request.items()]
    return _flatten([*groups, *last], len(groups))


def check_reads(batch: SpanBatch, reads: SharedReads | None) -> None:
    """Check that spans that count by other weights have a plan of reads, or raise a ValueError."""
    given = batch.reweighting
    if reads is None and given is not None and bool(given.is_chosen.any()):
        raise ValueError("spans that count by other weights need reads: see plan_shared_reads")


def _chosen(batch: SpanBatch, request_of: Mapping[int, int]) -> dict[int, int]:
    """Spans that count by other weights, each with its request."""
    if batch.reweighting is None:
        return {}
    is_chosen = ints(batch.reweighting.is_chosen)
    return {j: r for j, r in request_of.items() if is_chosen[j]}


def _beyond_cap(
    sizes: Mapping[tuple[int, ...], int], counts: Sequence[int], max_partials: int
) -> set[tuple[int, ...]]:
    """Readers that must not read together, or partial results would exceed `max_partials`.

    Args:
        sizes: tokens that readers have in common.
        counts: queries of each request, by `counted_queries`.
    """
    rows = {readers: sum(counts[r] for r in readers) for readers in sizes}
    # Tokens that are not read again, for each partial result.
    worth = {readers: size * (len(readers) - 1) / rows[readers] for readers, size in sizes.items()}
    dropped, grouped, total = set(), set[int](), 0
    for readers in sorted(sizes, key=lambda readers: (-worth[readers], readers)):
        # Requests that are in a group at all leave one more, of what they read alone.
        new = set(readers) - grouped
        added = rows[readers] + sum(counts[r] for r in new)
        if total + added > max_partials:
            dropped.add(readers)
        else:
            total, grouped = total + added, grouped | new
    return dropped


def _parent_spans(batch: SpanBatch) -> dict[int, int]:
    """Spans but the own ones, each with its request."""
    bounds = itertools.pairwise(ints(batch.span_start_loc))
    return {j: r for r, (begin, end) in enumerate(bounds) for j in range(begin, end - 1)}


# Slots of a block that a span reads: (block id, first, last + 1).
_Cut = tuple[int, int, int]


def _pieces(batch: SpanBatch, request_of: dict[int, int]) -> Iterator[SharedPiece]:
    """Pieces of the spans, cut where their readers change."""
    readers: dict[tuple[_Cut, ...], list[int]] = {}
    cuts_of: dict[tuple[int, int, bytes], tuple[_Cut, ...]] = {}
    table = batch.block_table.numpy()
    size = batch.block_size
    first_slot, num_tokens = ints(batch.first_slot), ints(batch.num_tokens)
    for j, r in request_of.items():
        first, last = first_slot[j], first_slot[j] + num_tokens[j]
        blocks = table[r, first // size : -(-last // size)]
        key = (first % size, num_tokens[j], blocks.tobytes())
        cuts = cuts_of.get(key)
        if cuts is None:
            cuts = cuts_of[key] = _cuts(blocks.tolist(), first % size, num_tokens[j], size)
        readers.setdefault(cuts, []).append(j)
    yield from _runs(readers)


def _cuts(blocks: Sequence[int], first: int, num_tokens: int, size: int) -> tuple[_Cut, ...]:
    """Slots of each block that a span reads which begins at slot `first` of its first block."""
    last = first + num_tokens
    return tuple(
        (block, max(first - k * size, 0), min(last - k * size, size))
        for k, block in enumerate(blocks)
    )


def _runs(readers: dict[tuple[_Cut, ...], list[int]]) -> Iterator[SharedPiece]:
    """Whole spans, and runs of blocks of those that overlap others in part (sub-spans).

    A block that two spans cut differently is read by each alone.
    """
    spans_of: dict[_Cut, tuple[int, ...]] = {}
    for cuts, found in readers.items():
        for cut in cuts:
            spans_of[cut] = (*spans_of.get(cut, ()), *found)
    runs: dict[tuple[_Cut, ...], list[tuple[int, int]]] = {}
    for cuts, found in readers.items():
        begin = 0
        for _, run in itertools.groupby(cuts, key=spans_of.__getitem__):
            run_cuts = tuple(run)
            runs.setdefault(run_cuts, []).extend((j, begin) for j in found)
            begin += sum(stop - start for _, start, stop in run_cuts)
    for run_cuts, reads in runs.items():
        num_tokens = sum(stop - start for _, start, stop in run_cuts)
        yield SharedPiece(num_tokens, tuple(sorted(reads)))


def _flatten(groups: Sequence[Group], first_chosen: int) -> SharedReads:
    def starts(counts: Iterator[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)

    pieces = [piece for group in groups for piece in group.pieces]
    reads = [read for piece in pieces for read in piece.reads]
    columns = torch.tensor(reads, dtype=torch.int32).reshape(-1, 2).T.contiguous()
    return SharedReads(
        member_start_loc=starts(len(group.members) for group in groups),
        member_req=torch.tensor([r for g in groups for r in g.members], dtype=torch.int32),
        piece_start_loc=starts(len(group.pieces) for group in groups),
        piece_tokens=torch.tensor([piece.num_tokens for piece in pieces], dtype=torch.int32),
        read_start_loc=starts(len(g.pieces) * len(g.members) for g in groups),
        read_span=columns[0],
        read_begin=columns[1],
        first_chosen=first_chosen,
    )
