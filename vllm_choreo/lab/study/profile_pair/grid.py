# SPDX-License-Identifier: Apache-2.0
"""Choices of layers that are tried: a coarse grid, then what lies next to the best of it.

Blocks are contiguous, `reuse → recompute → reuse`, for where reading turns into computing the
writer's hidden states take the place of the reader's; one more block may begin at layer 0, which is
given the tokens (`recompute → reuse → recompute → reuse`; DroidSpeak, arXiv 2411.02820, 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from vllm_choreo.repair.pair import Ranges
from vllm_choreo.repair.runs import merge_ranges

# Into so many parts the layers are cut first.
PARTS = 5


def coarse(num_layers: int, parts: int = PARTS) -> list[Ranges]:
    """All blocks between the ends of parts that are as equal as can be; fewest layers first."""
    ends = sorted({round(part * num_layers / parts) for part in range(parts + 1)})
    blocks = [((first, stop),) for first, stop in combinations(ends, 2)]
    return sorted(blocks, key=lambda block: block[0][1] - block[0][0])


def finer(around: Iterable[Ranges], step: int, num_layers: int) -> list[Ranges]:
    """Blocks of which an end, or both, lie `step` layers from those of a block; and with a head.

    The head is a further block of `step` layers from layer 0 on.
    """
    found: dict[Ranges, None] = {}
    for ranges in around:
        *head, (first, stop) = ranges
        for lower in (first, first - step, first + step):
            for upper in (stop, stop - step, stop + step):
                block = (max(0, lower), min(num_layers, upper))
                if block[0] < block[1]:
                    found[merge_ranges((*head, block))] = None
        if not head and first > step:
            found[((0, step), (first, stop))] = None
    return [ranges for ranges in found if ranges not in around]


def steps(num_layers: int, parts: int = PARTS) -> list[int]:
    """Numbers of layers by which ends are moved, round by round."""
    step, found = max(1, round(num_layers / parts)), []
    while step > 1:
        step //= 2
        found.append(step)
    return found


def singles(num_layers: int) -> list[Ranges]:
    """Each layer by itself."""
    return [((layer, layer + 1),) for layer in range(num_layers)]


def scattered(gains: Sequence[float], count: int) -> Ranges:
    """The `count` layers that gain most by themselves; neighbours are one block."""
    best = sorted(range(len(gains)), key=lambda layer: -gains[layer])[:count]
    return merge_ranges([(layer, layer + 1) for layer in best])
