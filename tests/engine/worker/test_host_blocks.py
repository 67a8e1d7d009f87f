# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks in host memory."""

from __future__ import annotations

import pytest
import torch

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
