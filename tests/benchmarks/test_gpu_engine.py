# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU, as far as a CPU can tell: the program, and what stands in for compiled code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from benchmarks.gpu.engine import stand_ins

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_norms() -> None:
    torch.manual_seed(0)
    x, residual, weight = _drawn(5, 300), _drawn(5, 300), _drawn(300)
    found = torch.full_like(x, float("nan"))
    stand_ins.rms_norm(found, x, weight, 1e-6)
    torch.testing.assert_close(found, _normed(x, weight))
    found, total = x.clone(), residual.clone()
    stand_ins.fused_add_rms_norm(found, total, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(found, _normed(x + residual, weight))


def test_activation() -> None:
    torch.manual_seed(1)
    x = _drawn(3, 2400)
    found = torch.full((3, 1200), float("nan"), device=DEVICE)
    stand_ins.silu_and_mul(found, x)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(found, F.silu(gate) * up)


def test_rotary_embedding() -> None:
    """Queries and keys are parts of one tensor, as vLLM's layers hand them over."""
    torch.manual_seed(2)
    positions, num_heads, size = torch.tensor([0, 5, 9], device=DEVICE), 3, 64
    angles = torch.arange(10)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
    query, key, _ = _drawn(3, 3 * num_heads * size).split(num_heads * size, -1)
    cos, sin = cache[positions][:, None].chunk(2, -1)
    expected = []
    for heads in (query, key):
        a, b = heads.reshape(3, num_heads, size).chunk(2, -1)
        expected.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1))
    stand_ins.rotary_embedding(positions, query, key, size, cache, True)
    torch.testing.assert_close([query, key], expected)
    with pytest.raises(NotImplementedError):
        stand_ins.rotary_embedding(positions, query, key, size, cache, False)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workflows_run_on_both_sides() -> None:
    arguments = ["workflows", "--shape", "tiny", "--answer-tokens", "6", "--repeats", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu.engine", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 4, done.stdout
