# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of choreographed batches before the first one comes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.batch import BatchPlanner, to_device
from vllm_choreo.ops.tiles import MIN_ROWS

_NUM_REQUESTS = 3


@torch.inference_mode()
def warm_up(layers: Iterable[Any], planner: BatchPlanner, table_width: int) -> None:
    """Run every kind of layer once on made-up calls, whose results nobody sees.

    They read the same tokens, with few, some and many queries: that takes tiles of every size,
    and results that are merged.

    Args:
        layers: of the model, with their KV caches.
        planner: not used by anything else yet.
        table_width: columns of the block tables that batches have.
    """
    # All zeros: block 0 belongs to no request.
    table = torch.zeros(_NUM_REQUESTS, table_width, dtype=torch.int32, device=planner.device)
    kinds = {_kind(layer): layer for layer in layers}
    for layer in kinds.values():
        num_heads, num_kv_heads, head_size, dtype = layer.impl.shape
        num_queries = _start_batch(planner, num_heads // num_kv_heads, table)
        query = torch.zeros(num_queries, num_heads, head_size, dtype=dtype, device=planner.device)
        layer.impl.forward(layer, query, None, None, layer.kv_cache, None, torch.empty_like(query))
    planner.running = None
    planner.update({}, map(str, range(_NUM_REQUESTS)))


def _kind(layer: Any) -> tuple[Any, ...]:
    """What the kernels are compiled for."""
    impl = layer.impl
    rotation = impl.rotation and (impl.rotation.rotary_dim, impl.rotation.is_neox)
    return impl.shape, rotation, bool(impl.logits_soft_cap), impl.alibi_slopes is not None


def _start_batch(planner: BatchPlanner, group_heads: int, block_table: torch.Tensor) -> int:
    """Make the calls the running batch. Returns its number of queries."""
    base = planner.block_size
    room = (block_table.shape[1] - 1) * base
    lens = [min(n // group_heads + 1, room) for n in (0, MIN_ROWS, 4 * MIN_ROWS)]
    spans = {str(r): RequestSpans((0,), (base,), (0,), (r,), base) for r in range(_NUM_REQUESTS)}
    planner.update(spans, [], dict.fromkeys(spans, (0,)))
    query_start_loc = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32) + base
    planner.running = planner.batch(
        list(spans), query_start_loc, seq_lens, block_table, to_device(seq_lens, planner.device)
    )
    return sum(lens)
