# SPDX-License-Identifier: Apache-2.0
"""What tiles and items are made of, against what each query is to read, for any requests."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.drawn import SIZE, batch_of, requests
from vllm_choreo.ops import SpanBatch, plan_shared_reads
from vllm_choreo.ops.tile_planner import plan_tiles
from vllm_choreo.ops.tiles import Tiles

HEADS = {"num_heads": 8, "num_kv_heads": 2}


def _slot(batch: SpanBatch, request: int, slot: int) -> int:
    return int(batch.block_table[request, slot // SIZE]) * SIZE + slot % SIZE


def to_read(batch: SpanBatch, query: int, window: int | None) -> Counter:
    """Slots of parents' tokens, and positions, at which a query is to see them."""
    request = int((batch.query_start_loc[1:] <= query).sum())
    first, last = batch.span_start_loc[request : request + 2].tolist()
    own = int(batch.num_tokens[last - 1] - batch.query_start_loc[request + 1]) + query
    at = int(batch.stored_position[last - 1]) + own
    found = Counter()
    for span in range(first, last - 1):
        position = int(batch.stored_position[span] - batch.position_delta[span])
        for i in range(int(batch.num_tokens[span])):
            if window is None or position + i > at - window:
                found[_slot(batch, request, int(batch.first_slot[span]) + i), position + i] += 1
    return found


def is_read(batch: SpanBatch, tiles: Tiles) -> tuple[dict[int, Counter], dict[int, Counter]]:
    """What the items of tiles read for each query: tokens of parents, and shares of own tokens."""
    parents, own = {}, {}
    for tile_class in tiles.classes:
        for tile, first, end, request, share, shares, *_ in tile_class.items.tolist():
            slots = zip(tile_class.query[tile], tile_class.column[tile], strict=True)
            for query, column in ((int(q), int(c)) for q, c in slots if q >= 0):
                seen = parents.setdefault(query, Counter())
                for read, reader, slot, num_tokens, before in tiles.segments[first:end].tolist():
                    position = int(tiles.read_position[read + column]) + before
                    seen.update(
                        (_slot(batch, reader, slot + i), position + i) for i in range(num_tokens)
                    )
                if request >= 0:
                    own.setdefault(query, Counter())[share, shares] += 1
    return parents, own


@settings(deadline=None, max_examples=60)
@given(
    st.lists(requests, min_size=1, max_size=5),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 8, 400]),
    st.sampled_from([None, 0, 12]),
    st.sampled_from([None, 7, 30]),
)
def test_queries_read_every_token_once(asked, max_rows, num_programs, max_partials, window):
    """Of windows, at least what they see: the rest is masked."""
    batch = batch_of(asked)
    tiles = plan_tiles(batch, plan_shared_reads(batch, min_tokens=1), **HEADS, max_rows=max_rows,
                       num_programs=lambda rows: num_programs, device="cpu",
                       max_partials=max_partials, window=window)  # fmt: skip
    parents, own = is_read(batch, tiles)
    for query in range(int(batch.query_start_loc[-1])):
        wanted, found = to_read(batch, query, window), parents[query]
        assert not wanted - found
        assert found <= to_read(batch, query, None)
        shares = {of for _, of in own[query]}
        assert len(shares) == 1
        assert own[query] == Counter((i, of) for of in shares for i in range(of))
