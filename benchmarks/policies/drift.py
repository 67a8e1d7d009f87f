# SPDX-License-Identifier: Apache-2.0
"""What many moves in place do to keys in bfloat16, against one rotation of the query.

Random keys move by random deltas, one move after the other, each rounded to bfloat16. They are
compared with one rotation by the sum, in float64, and so is what attention makes of them.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_choreo.ops import (
    LayerAttention,
    Rotation,
    SpanBatch,
    SpanPlan,
    reposition_keys,
    span_attention,
)
from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.reference import rotate

MOVES = (1, 2, 4, 8, 16, 32, 64)
NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, GROUP = 16, 3, 32, 64, 3
NUM_QUERIES = 8
FARTHEST = 2000  # positions, of one move
THETA = 100_000.0  # base of the frequencies, that of the embedded model


def measure(num_seeds: int) -> list[dict[str, Any]]:
    """Per seed and number of moves: relative errors of keys and of attention, root mean square.

    `query` is the error of attention when keys stay and the query is turned by the same sum.
    """
    return [row for seed in range(num_seeds) for row in _one_cache(seed)]


def _one_cache(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    # One block more, for the token that the queries' own message holds.
    shape = (NUM_BLOCKS + 1, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    first = torch.randn(shape, generator=generator).to(torch.bfloat16)
    query = torch.randn(NUM_QUERIES, NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator)
    query = query.to(torch.bfloat16)
    deltas = torch.randint(-FARTHEST, FARTHEST + 1, (max(MOVES),), generator=generator)
    half = torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64)
    rotation = Rotation(inv_freq=THETA ** -(half / HEAD_SIZE), is_neox=True)
    blocks = torch.arange(NUM_BLOCKS, dtype=torch.int32)
    moved, rows = first.clone(), []
    for count, delta in enumerate(deltas, start=1):
        reposition_keys(moved, blocks, blocks, rotation.cos_sin(delta.expand(NUM_BLOCKS)))
        if count not in MOVES:
            continue
        total = int(deltas[:count].sum())
        exact = key_view(first).double()
        exact[:NUM_BLOCKS] = _rotated(exact[:NUM_BLOCKS], total, rotation)
        wanted = _attention(query.double(), exact, value_view(first).double())
        keys = key_view(moved).double()
        rows.append(
            {
                "seed": seed,
                "moves": count,
                "keys": _error(keys[:NUM_BLOCKS], exact[:NUM_BLOCKS]),
                "in_place": _error(_attend(query, moved, rotation, 0), wanted),
                # Keys turned ahead meet a query as if it had been turned back.
                "query": _error(_attend(query, first, rotation, -total), wanted),
            }
        )
    return rows


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference / that of what was wanted."""
    return float((found.double() - wanted).norm() / wanted.norm())


def _rotated(keys: torch.Tensor, delta: int, rotation: Rotation) -> torch.Tensor:
    """Float64 keys `[..., head_size]`, rotated once; the angles are not rounded either."""
    angles = delta * rotation.inv_freq
    return rotate(keys, torch.cat([angles.cos(), angles.sin()]), rotation.is_neox)


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Float64 `[num_queries, num_heads, head_size]`: all blocks, of the last one a token.

    Keys and values are `[num_blocks, num_kv_heads, block_size, head_size]`.
    """
    num_tokens = NUM_BLOCKS * BLOCK_SIZE + 1
    keys, values = (x.transpose(0, 1).flatten(1, 2)[:, :num_tokens] for x in (keys, values))
    grouped = query.view(NUM_QUERIES, NUM_KV_HEADS, GROUP, HEAD_SIZE)
    scores = torch.einsum("qhgd,hkd->qhgk", grouped, keys) * HEAD_SIZE**-0.5
    return torch.einsum("qhgk,hkd->qhgd", scores.softmax(-1), values).flatten(1, 2)


def _attend(
    query: torch.Tensor, cache: torch.Tensor, rotation: Rotation, delta: int
) -> torch.Tensor:
    """The same by `ops.span_attention`, in bfloat16: one request per query, two spans each."""
    deltas = _ints([delta, 0] * NUM_QUERIES)
    base = NUM_BLOCKS * BLOCK_SIZE
    batch = SpanBatch(
        query_start_loc=torch.arange(NUM_QUERIES + 1, dtype=torch.int32),
        block_table=torch.arange(NUM_BLOCKS + 1, dtype=torch.int32).repeat(NUM_QUERIES, 1),
        span_start_loc=2 * torch.arange(NUM_QUERIES + 1, dtype=torch.int32),
        first_slot=_ints([0, base] * NUM_QUERIES),
        num_tokens=_ints([base, 1] * NUM_QUERIES),
        stored_position=_ints([0, base] * NUM_QUERIES),
        position_delta=deltas,
        block_size=BLOCK_SIZE,
    )
    batch.validate(cache.shape[0])
    output = torch.empty_like(query)
    plan = SpanPlan(batch, rotation.cos_sin(deltas))
    span_attention(query, cache, output, plan, LayerAttention(scale=HEAD_SIZE**-0.5))
    return output


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
