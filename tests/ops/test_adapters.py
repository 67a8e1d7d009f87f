# SPDX-License-Identifier: Apache-2.0
"""Products of adapters: their definition in float64, rows that do not mind each other, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.conftest import ISAS, chosen
from vllm_choreo.ops import AdapterFactors, add_adapter, factors_of

# in_features, and of each slice the columns of the output and the rank; None: not trained.
SHAPES = {
    "one": (64, [(32, 16)]),
    "attention": (576, [(576, 16), (192, 16), (192, 16)]),
    "ranks that differ": (48, [(40, 3), (16, None), (24, 33)]),
    "columns that fill no vector": (30, [(7, 5), (1, 2), (67, 8)]),
}


@pytest.fixture(params=["reference", *ISAS])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from chosen(request.param)


def make(
    shape: str, dtype: torch.dtype, num_rows: int
) -> tuple[AdapterFactors, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors, an input and an output that lie within larger tensors, and the added, float64."""
    features, slices = SHAPES[shape]
    x = torch.randn(num_rows, features + 5).to(dtype)[:, 2:-3]
    y = torch.randn(num_rows, sum(size for size, _ in slices) + 9).to(dtype)[:, 4:-5]
    pairs, added = [], []
    for size, rank in slices:
        a, b = torch.randn(40, features), torch.randn(size, 40) / 6
        b[:, rank or 0 :] = 0
        a, b = a.to(dtype), b.to(dtype)
        pairs.append((a, b))
        added.append(0.5 * (x.double() @ a.double().T) @ b.double().T)
    factors = factors_of(pairs, dtype)
    assert factors is not None
    return factors, x, y, torch.cat(added, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_the_rows_that_are_named(impl, shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    for num in (1, 5, 6, 23, 150):
        factors, x, y, added = make(shape, dtype, num + 4)
        rows = torch.randperm(num + 4)[:num]
        before, others = y.clone(), torch.ones(num + 4, dtype=torch.bool)
        whole = y._base.clone()  # of which y is a part
        others[rows] = False
        add_adapter(y, x, rows, factors, 0.5, impl)
        assert torch.equal(y[others], before[others])
        expected = before[rows].double() + added[rows]
        error = (y[rows].double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2), num
        y.copy_(before)
        assert torch.equal(y._base, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others(impl, shape: str, dtype: torch.dtype) -> None:
    """Not by a bit: a message of which a twin had all but the last token is the same."""
    torch.manual_seed(5)
    factors, x, y, _ = make(shape, dtype, 40)

    def added(*names: int) -> torch.Tensor:
        output = y.clone()
        add_adapter(output, x, torch.tensor(names), factors, 1.0, impl)
        return output[list(names)]

    most = 16 if impl == "reference" else 40  # MKL sums more rows in yet another order
    whole = added(*range(most))
    for start, stop in ((0, 1), (0, 2), (0, 5), (0, 15), (most - 1, most), (3, 9), (7, most)):
        assert torch.equal(added(*range(start, stop)), whole[start:stop]), (start, stop)
    assert torch.equal(added(11, 2, 8), whole[[11, 2, 8]])


def test_no_rows(impl) -> None:
    factors, x, y, _ = make("one", torch.float32, 3)
    before = y.clone()
    add_adapter(y, x, torch.empty(0, dtype=torch.int64), factors, 1.0, impl)
    assert torch.equal(y, before)


def test_what_training_has_not_touched_is_left_out() -> None:
    a = torch.randn(4, 32)
    untouched, two_ranks = torch.zeros(6, 4), torch.zeros(5, 4)
    two_ranks[2, 1] = 3
    factors = factors_of([(a, untouched), (a, two_ranks)], torch.float32)
    assert factors is not None and factors.shrink.shape == (32, 16)
    assert torch.equal(factors.shrink[:, :2], a[:2].T) and not factors.shrink[:, 2:].any()
    (part,) = factors.slices
    assert (part.columns, part.ranks, part.expand.shape) == (slice(6, 11), slice(0, 2), (2, 5))
    assert factors_of([(a, untouched)], torch.float32) is None


@pytest.mark.skipif(not ISAS, reason="the C++ kernels are not built")
def test_what_does_not_fit_is_refused() -> None:
    factors, x, y, _ = make("attention", torch.float32, 4)
    rows, before = torch.arange(4), y.clone()
    for error, says, arguments in (
        (ValueError, "x must be .* at least 576", (y, x[:, :-1], rows)),
        (ValueError, "y must be .* at least 960", (y[:, :-1], x, rows)),
        (ValueError, "x is BFloat16, the adapter Float", (y, x.bfloat16(), rows)),
        (ValueError, "contiguous last dim", (y.T.contiguous().T, x, rows)),
        (ValueError, "x has 3 rows, y 4", (y, x[:3], rows)),
        (ValueError, "int64", (y, x, rows.int())),
        (IndexError, "row 4 of 4", (y, x, rows + 1)),
        (IndexError, "row -1 of 4", (y, x, rows - 1)),
    ):
        with pytest.raises(error, match=says):
            add_adapter(*arguments, factors, 1.0, "cpu")
    assert torch.equal(y, before)
    half = factors_of([(torch.randn(4, 8), torch.randn(8, 4))], torch.float16)
    assert half is not None
    with pytest.raises(ValueError, match="float32 and bfloat16, not Half"):
        add_adapter(y.half(), x.half(), rows, half, 1.0, "cpu")
