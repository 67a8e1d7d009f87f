# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a message another context changes most, by their keys in one of the first layers.

After CacheBlend (arXiv 2405.16444, 4.3), by blocks: what is chosen is repaired in all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from vllm_choreo.engine.step import StageRun
from vllm_choreo.ops.layout import read_kv, write_kv


def write_by_keys(
    run: StageRun,
    layers: Mapping[str, Any],
    num_layers: int,
    write: Callable[[Sequence[StageRun]], None],
) -> None:
    """Run the tokens through the first layers, then those that change most through all.

    Args:
        run: has a share. Where its tokens go, the stored keys and values lie already.
        layers: the attention layers, in their order.
        num_layers: of the model.
        write: runs tokens through the layers of their runs.
    """
    ((start, stop),) = run.layers
    assert run.share is not None and start == 0
    first = [*islice(layers.values(), stop)]
    block_size = first[0].kv_cache.shape[2]
    slots = slots_of(run, block_size).to(first[0].kv_cache.device)
    stored = [read_kv(layer.kv_cache, slots, layer.impl.layout) for layer in first]
    write([run])
    keys, _ = read_kv(first[-1].kv_cache, slots, first[-1].impl.layout)
    change = (keys.float() - stored[-1][0].float()).square().sum((1, 2))
    # Every worker has its heads, and all must choose alike.
    change = tensor_model_parallel_all_reduce(change).cpu()
    for layer, (keys, values) in zip(first, stored, strict=True):
        write_kv(layer.kv_cache, slots, keys, values, layer.impl.layout)
    write(
        [
            replace(
                run,
                layers=((0, num_layers),),
                first=run.first + start,
                token_ids=run.token_ids[start:stop],
                start=run.start + start,
                share=None,
            )
            for start, stop in chosen_parts(change, run.start, block_size, run.share)
        ]
    )


def chosen_parts(
    change: torch.Tensor, start: int, block_size: int, share: float
) -> list[tuple[int, int]]:
    """The blocks of the greatest change per token that together make up at most the share.

    Args:
        change: of each token, float32 `[num_tokens]`.
        start: where in its message the first token stands.

    Returns:
        Runs of tokens, ascending, that count from the first.
    """
    stop = start + len(change)
    parts = [
        (max(edge, start) - start, min(edge + block_size, stop) - start)
        for edge in range(start - start % block_size, stop, block_size)
    ]
    ranked = sorted(parts, key=lambda part: -float(change[part[0] : part[1]].mean()))
    budget, chosen = share * len(change), []
    for part in ranked:
        if part[1] - part[0] <= budget:
            budget -= part[1] - part[0]
            chosen.append(part)
    return sorted(chosen)


def slots_of(run: StageRun, block_size: int) -> torch.Tensor:
    """Where the keys and values of each token are stored, int64 `[num_tokens]`."""
    indices = torch.arange(run.first, run.first + len(run.token_ids))
    return torch.tensor(run.blocks)[indices // block_size] * block_size + indices % block_size
