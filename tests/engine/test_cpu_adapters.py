# SPDX-License-Identifier: Apache-2.0
"""Adapters on CPU: every row gets the products of its own, whichever rows stand beside it."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping

from vllm_choreo.engine.worker.cpu_adapters import (
    ChoreoPunicaWrapperCPU,
    rows_by_adapter,
)

SLICES = (24, 8, 8)
RANK, FEATURES, NUM_ADAPTERS = 4, 32, 3


def wrapper_of(ids: list[int], is_prefill: bool) -> ChoreoPunicaWrapperCPU:
    """Told of a step whose rows wear these adapters; 0: none."""
    wrapper = ChoreoPunicaWrapperCPU(64, 16, "cpu")
    wrapper.start()
    mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=is_prefill)
    wrapper.update_metadata(mapping, [11, 12, 13], NUM_ADAPTERS, 100)
    return wrapper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([0] * 5, id="none"),
        pytest.param([12] * 7, id="one"),
        pytest.param([0, 0, 13, 13, 13, 11, 0], id="runs"),
        pytest.param([11, 0, 12, 11, 0, 13, 12, 11], id="mixed"),
    ],
)
def test_each_row_gets_the_products_of_its_adapter(
    ids: list[int], is_prefill: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(ids))
    a = [torch.randn(NUM_ADAPTERS, 1, RANK, FEATURES, dtype=dtype) for _ in SLICES]
    b = [torch.randn(NUM_ADAPTERS, 1, size, RANK, dtype=dtype) for size in SLICES]
    x, before = torch.randn(len(ids), FEATURES, dtype=dtype), torch.randn(len(ids), 40, dtype=dtype)
    y = before.clone()
    wrapper_of(ids, is_prefill).add_lora_linear(y, x, tuple(a), tuple(b), 0.5, SLICES)

    for row, adapter in enumerate(ids):
        if not adapter:
            assert torch.equal(y[row], before[row])  # to the last bit
            continue
        parts = [
            x[row].double() @ one[adapter - 11, 0].double().T @ other[adapter - 11, 0].double().T
            for one, other in zip(a, b, strict=True)
        ]
        expected = before[row].double() + 0.5 * torch.cat(parts)
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        assert (y[row].double() - expected).abs().max() < tolerance


def test_rows_of_each_adapter() -> None:
    found = rows_by_adapter(torch.tensor([-1, 2, 2, 0, -1, 0]))
    assert {adapter: rows.tolist() for adapter, rows in found.items()} == {0: [3, 5], 2: [1, 2]}


def test_before_the_first_step_nobody_wears_any() -> None:
    wrapper = ChoreoPunicaWrapperCPU(64, 16, "cpu")
    wrapper.start()
    y = torch.zeros(2, 8)
    wrapper.add_lora_linear(y, torch.ones(2, 4), (), (), 1.0, ())
    assert not y.any()


def test_an_adapter_that_takes_the_place_of_another_is_seen() -> None:
    """Also of one that had not touched a layer, and when weights are loaded while serving."""
    torch.manual_seed(3)
    x, y = torch.randn(20, FEATURES), torch.zeros(20, 8)
    a, b = torch.randn(NUM_ADAPTERS, 1, RANK, FEATURES), torch.zeros(NUM_ADAPTERS, 1, 8, RANK)
    wrapper = wrapper_of([12] * 20, True)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
    assert not y.any()
    with torch.inference_mode():
        b[1, 0, :, :2].copy_(torch.randn(8, 2))
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
    torch.testing.assert_close(y, x @ a[1, 0].T @ b[1, 0].T, rtol=1e-4, atol=1e-4)
    b[1] = 0
    before = y.clone()
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
    assert torch.equal(y, before)


def test_weights_whose_changes_nobody_counts_are_looked_at_each_time() -> None:
    with torch.inference_mode():
        x, y = torch.randn(20, FEATURES), torch.zeros(20, 8)
        a, b = torch.randn(NUM_ADAPTERS, 1, RANK, FEATURES), torch.zeros(NUM_ADAPTERS, 1, 8, RANK)
        wrapper = wrapper_of([12] * 20, True)
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
        assert not y.any()
        b[1] = torch.randn(8, RANK)
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
    torch.testing.assert_close(y, x @ a[1, 0].T @ b[1, 0].T, rtol=1e-4, atol=1e-4)
