# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks in host memory."""

from __future__ import annotations

import random

import pytest
import torch

from tools.gpu_dry_run.device import DeviceDouble
from vllm_choreo.engine.worker import host_blocks
from vllm_choreo.engine.worker.host_blocks import HostBlocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_nobody_wrote_are_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file holds of a message fills a part of its last block, and all of it is copied."""
    monkeypatch.setattr(torch, "empty", lambda *size, **like: torch.full(*size, torch.nan, **like))
    cache = torch.zeros(3, 4, 2, 8, dtype=dtype).transpose(1, 2)
    blocks = HostBlocks([cache], 2)
    blocks.copies[0][1, 0] = 1
    blocks.copy([], [(1, 2)])
    assert (cache[2, 0] == 1).all() and not cache[2, 1].any() and not cache[:2].any()


@pytest.mark.parametrize("most_blocks", [1, 3, 1000])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_blocks_that_are_gathered_are_those_of_each_pair(
    order: tuple[int, ...], most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, in runs, a few at a time; nobody waits. Later loads into a block count."""
    if "pin_memory" in vars(torch.Tensor):
        monkeypatch.delattr(torch.Tensor, "pin_memory")  # vLLM's for CPUs, which does nothing
    rng, sizes = random.Random(len(order) + most_blocks), (20, 2, 4, 6)
    monkeypatch.setattr(host_blocks, "_STAGED_BYTES", most_blocks * 2 * 4 * 6 * 4)
    lies = [torch.randn([sizes[dim] for dim in order]) for _ in range(2)]
    original = [x.permute([order.index(dim) for dim in range(4)]).clone() for x in lies]
    saves = list(zip(rng.sample(range(20), 9), rng.sample(range(12), 9), strict=True))
    saved = {host: block for block, host in saves}
    loads = [(host, rng.randrange(20)) for host in rng.sample(sorted(saved), 7) * 2]
    expected = [x.clone() for x in original]
    for x, before in zip(expected, original, strict=True):
        for host, block in loads:
            x[block] = before[saved[host]]
    double = DeviceDouble()
    with double:
        there = [x.to("cuda").permute([order.index(dim) for dim in range(4)]) for x in lies]
        kept = HostBlocks(there, 12)
        double.syncs.clear()
        kept.copy(saves, [])
        assert double.syncs == []
        double.wait("all")  # its copies to the host are late for everybody, not for the host alone
        double.syncs.clear()
        kept.copy([], loads)
        assert double.syncs == []
        for x, wanted in zip(there, expected, strict=True):
            assert torch.equal(x.cpu(), wanted)


def test_runs_of_numbers() -> None:
    assert list(host_blocks._runs([3])) == [(0, 1, 3)]
    assert list(host_blocks._runs([3, 4, 5, 8, 9, 11])) == [(0, 3, 3), (3, 5, 8), (5, 6, 11)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_host_blocks_keep_the_order_of_the_cache(order: tuple[int, ...]) -> None:
    """Dims in memory as in vLLM's layouts: heads first, slots first, heads before blocks."""
    sizes = (5, 2, 4, 6)
    lies = torch.randn([sizes[dim] for dim in order], generator=torch.Generator().manual_seed(1))
    cache = lies.permute([order.index(dim) for dim in range(4)])
    original = cache.clone()
    blocks = HostBlocks([cache], 3)
    blocks.copy([(4, 0), (1, 2)], [])
    if order[0] == 0:
        assert blocks.copies[0][0].stride() == cache[0].stride(), "a block is one run"
    cache.zero_()
    blocks.copy([], [(0, 2), (2, 4)])
    assert torch.equal(cache[2], original[4]) and torch.equal(cache[4], original[1])
    assert not cache[[0, 1, 3]].any()
