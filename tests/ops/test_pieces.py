# SPDX-License-Identifier: Apache-2.0
"""Pieces that spans are cut into, against their definition, for any messages and parts of them."""

from itertools import groupby, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.drawn import SIZE, batch_of, requests
from vllm_choreo.ops import SpanBatch, plan_shared_reads


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
