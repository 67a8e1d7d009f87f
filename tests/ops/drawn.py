# SPDX-License-Identifier: Apache-2.0
"""Batches of any requests that read any parts of a few messages, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.ops.cases import ints
from vllm_choreo.ops import SpanBatch

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
