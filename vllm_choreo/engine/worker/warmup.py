# SPDX-License-Identifier: Apache-2.0
"""Compilation of the Triton kernels of choreographed batches before the first one comes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.layer_kinds import LayerKind
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.tensors import to_device
from vllm_choreo.ops import flash_prefills
from vllm_choreo.ops.sharing import MIN_SHARED_TOKENS
from vllm_choreo.ops.tiles import MIN_ROWS

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

# That the first requests fill, for tiles of each size; two of them have one query each.
_NUM_ROWS = (0, 0, MIN_ROWS, 4 * MIN_ROWS)
_MOST_REQUESTS = len(_NUM_ROWS) + 1


@torch.inference_mode()
def warm_up(layers: Iterable[Attention], batcher: SpanBatcher, table_width: int) -> None:
    """Run every kind of layer once on made-up calls, whose results nobody sees.

    They read the same tokens, two with one query each, and with some and many queries: that takes
    tiles of every size, and results that are merged. If FlashAttention runs long prefills there is
    one more, as long as need be.

    Args:
        layers: attention layers of the model, with their KV caches.
        batcher: the worker's batcher, not used by anything else yet.
        table_width: columns of the block tables that batches have.
    """
    # All zeros: block 0 belongs to no request.
    table = torch.zeros(_MOST_REQUESTS, table_width, dtype=torch.int32, device=batcher.device)
    min_saved_bytes, batcher.min_saved_bytes = batcher.min_saved_bytes, 0
    for layer in {_compiled_for(batcher, layer): layer for layer in layers}.values():
        shape, impl = _kind(batcher, layer).shape, layer.impl
        num_queries = _start_batch(batcher, shape.num_heads // shape.num_kv_heads, table)
        size = num_queries, shape.num_heads, shape.head_size
        query = torch.zeros(size, dtype=shape.dtype, device=batcher.device)
        output = query[..., : impl.value_size].clone(memory_format=torch.contiguous_format)
        impl.attend(query, impl.kv_cache_of(layer), output)
    batcher.running, batcher.min_saved_bytes = None, min_saved_bytes
    batcher.update({}, map(str, range(_MOST_REQUESTS)))


def _kind(batcher: SpanBatcher, layer: Attention) -> LayerKind:
    return batcher.kinds[layer.impl.plan_index]


def _compiled_for(batcher: SpanBatcher, layer: Attention) -> tuple[object, ...]:
    """Properties of a layer for which kernels are compiled."""
    rotation, shape, token_bytes, _ = _kind(batcher, layer)
    turns = rotation and (rotation.rotary_dim, rotation.is_neox)
    attention = layer.impl.attention
    has_floats = (attention.alibi_slopes is not None, attention.sinks is not None)
    # Of layers alike, some may cache 8 bits: `token_bytes` tells them apart.
    return shape, token_bytes, turns, bool(attention.softcap), has_floats


def _start_batch(batcher: SpanBatcher, group_heads: int, block_table: torch.Tensor) -> int:
    """Make the made-up calls the running batch; returns its number of queries."""
    size = batcher.block_size
    num_tokens = block_table.shape[1] * size
    bases = [-(-MIN_SHARED_TOKENS // size) * size] * len(_NUM_ROWS)
    lens = [min(n // group_heads + 1, num_tokens - bases[0]) for n in _NUM_ROWS]
    long_base = -(-flash_prefills.MIN_SPAN_TOKENS // size) * size
    num_queries = flash_prefills.MIN_QUERIES
    if batcher.flash_attention is not None and long_base + num_queries <= num_tokens:
        bases.append(long_base)
        lens.append(num_queries)
    spans = {str(r): RequestSpans((0,), (n,), (0,), (r,), n) for r, n in enumerate(bases)}
    batcher.update(spans, [], {str(r): ((0,) * (n // size),) for r, n in enumerate(bases)})
    query_start_loc = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32) + torch.tensor(bases, dtype=torch.int32)
    device_seq_lens = to_device(seq_lens, batcher.device)
    table = block_table[: len(bases)]
    step = StepBatch(list(spans), query_start_loc, seq_lens, table, device_seq_lens)
    batcher.running = batcher.batch(step)
    return sum(lens)
