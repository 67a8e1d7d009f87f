# SPDX-License-Identifier: Apache-2.0
"""Pieces that spans are cut into, against their definition, for any messages and parts of them."""

from itertools import groupby, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.cases import ints
from vllm_choreo.ops import SpanBatch, plan_shared_reads

SIZE = 4
# Messages by their blocks: copies of the first one share its beginning, its end, or all but one.
MESSAGES = [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8], [9, 10, 3, 4, 5], [1, 2, 11, 4, 5], [12], [13, 14]]
parents = st.tuples(st.sampled_from(MESSAGES), st.integers(0, 19), st.integers(1, 20))
requests = st.tuples(st.lists(parents, max_size=4), st.sampled_from([1, 1, 1, 3, 9]))


def batch_of(asked) -> SpanBatch:
    """Requests of `(parents, queries)`; a parent is `(message, first slot, tokens)`, cut to fit."""
    rows, spans, starts, loc = [], [], [0], [0]
    for r, (read, num_queries) in enumerate(asked):
        row = []
        for blocks, first, num_tokens in read:
            begin = first % (len(blocks) * SIZE)
            num_tokens = min(num_tokens, len(blocks) * SIZE - begin)
            spans.append((len(row) * SIZE + begin, num_tokens, 0, 0))
            row += blocks
        spans.append((len(row) * SIZE, num_queries, len(row) * SIZE, 0))
        row += [100 + 3 * r + k for k in range(3)]
        rows.append(row + [0] * (24 - len(row)))
        starts.append(len(spans))
        loc.append(loc[-1] + num_queries)
    columns = [ints(list(column)) for column in zip(*spans, strict=True)]
    table = torch.tensor(rows, dtype=torch.int32)
    batch = SpanBatch(ints(loc), table, ints(starts), *columns, SIZE)
    batch.validate(200)
    return batch


def defined_groups(batch: SpanBatch, min_tokens: int):
    """Pieces by their readers: blocks that the same spans read, one behind the other."""
    counts, start = batch.query_start_loc.diff().tolist(), batch.span_start_loc.tolist()
    cuts, request = {}, {}
    for r, (begin, end) in enumerate(pairwise(start)):
        for j in range(begin, end - 1):
            first, last = int(batch.first_slot[j]), int(batch.first_slot[j] + batch.num_tokens[j])
            request[j] = r
            cuts[j] = [
                (int(batch.block_table[r, b]), max(first - b * SIZE, 0), min(last - b * SIZE, SIZE))
                for b in range(first // SIZE, -(-last // SIZE))
            ]
    readers = {}
    for j in cuts:
        if counts[request[j]] <= 8:
            for cut in cuts[j]:
                readers.setdefault(cut, []).append(j)
    pieces = {}
    for j, listed in cuts.items():
        begin = 0
        for of_run, run in groupby(listed, key=lambda cut: tuple(readers.get(cut, ()))):
            run = tuple(run)
            of_run = of_run if j in of_run else (j,)
            pieces.setdefault((of_run, run), []).append((j, begin))
            begin += sum(end - first for _, first, end in run)
    groups, found = {}, []
    for (_, run), reads in pieces.items():
        num_tokens = sum(end - first for _, first, end in run)
        key = tuple(request[j] for j, _ in reads)
        groups.setdefault(key, []).append((num_tokens, tuple(reads)))
    for key, of_group in groups.items():
        if len(key) > 1 and sum(n for n, _ in of_group) >= min_tokens:
            found.append((key, sorted(of_group)))
    return sorted(found)


@settings(deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.sampled_from([1, 8, 20]))
def test_groups_are_those_of_the_definition(asked, min_tokens):
    batch = batch_of(asked)
    reads = plan_shared_reads(batch, min_tokens=min_tokens)
    groups = [] if reads is None else reads.groups()[batch.num_reqs :]
    found = [(g.members, sorted((p.num_tokens, p.reads) for p in g.pieces)) for g in groups]
    assert sorted(found) == defined_groups(batch, min_tokens)
