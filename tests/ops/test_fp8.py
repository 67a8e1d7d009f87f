# SPDX-License-Identifier: Apache-2.0
"""Caches of 8 bits: operations read what the bytes stand for, and nothing else is different.

What a byte stands for is written here a second time, by the definition of the formats; a cache of
those numbers in float32 is what the dense computation and the other tests know.
"""

import dataclasses
import functools
import math

import pytest
import torch

from tests.grids import sampled
from tests.ops.cases import (
    TOLERANCE,
    dense_attention,
    in_8_bits,
    in_float32,
    ints,
    make_case,
    make_rotation,
    number_of,
    run,
)
from tests.ops.test_sharing import WORKLOADS as SHARED
from tests.ops.test_sharing import shared_case, shared_reads
from tests.ops.test_span_attention import HEAD_SIZES, WORKLOADS
from tests.ops.test_span_attention import VARIANTS as ALL_VARIANTS
from vllm_choreo.ops import Layout, QuantizedKV, SpanBatch, reposition_keys, span_attention
from vllm_choreo.ops.layout import key_view, value_view

# Latent caches are refused: what is a key and a value at once would have two scales.
VARIANTS = {name: v for name, v in ALL_VARIANTS.items() if "value_size" not in v}
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
# Powers of two are no test of where scales are applied: these are none.
SCALES = {"key_scale": 0.37, "value_scale": 1.9}

of_all_formats = pytest.mark.parametrize(
    "fmt", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def fp8_case(fmt, *args, scales=None, **options):
    return in_8_bits(make_case(*args, **options), QuantizedKV(fmt, **(scales or SCALES)))


@of_all_formats
def test_what_a_byte_stands_for(fmt):
    """Of all 256, torch's numbers are those of the definition, with the scale of keys or values."""
    numbers = torch.tensor([number_of(byte, fmt) for byte in range(256)])
    stored = torch.arange(256, dtype=torch.uint8)
    quantized = QuantizedKV(fmt, **SCALES)
    same = functools.partial(torch.testing.assert_close, equal_nan=True, atol=0, rtol=1e-7)
    same(quantized.keys(stored), numbers * 0.37)
    same(quantized.values(stored), numbers * 1.9)


@of_all_formats
@pytest.mark.parametrize("group_heads", sampled([1, 40], 1), ids=["few rows", "many rows"])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_every_byte_is_read_for_what_it_stands_for(impl, fmt, part, group_heads):
    """Denormals, extremes and what is no number, whether a chunk is converted once or per row.

    Of two tokens of equal scores the output is the mean of their values; a key that is scored alone
    against one of zeros tells its number by the weight of its value.
    """
    for byte in range(0, 256, 7) if impl == "triton" else range(256):
        number = number_of(byte, fmt)
        cache = torch.zeros(1, 1, 16, 64, dtype=torch.uint8)
        (key_view, value_view)[part](cache)[0, 0, 0, :16] = byte
        query = torch.zeros(1, group_heads, 32)
        if part == 0:
            one = next(b for b in range(256) if number_of(b, fmt) == 1.0)
            value_view(cache)[0, 0, 0] = one
            # One dim alone, scaled so that a score is at most 4.
            query[..., 0] = 4.0 / abs(number) if number and math.isfinite(number) else 1.0
        batch = SpanBatch(ints([0, 1]), ints([0])[None], ints([0, 1]), ints([0]), ints([2]),
                          ints([0]), ints([0]), 16)  # fmt: skip
        case = dataclasses.replace(
            make_case(0, [(1, 1, [])], num_kv_heads=1, group_heads=group_heads, head_size=32),
            query=query, kv_cache=cache, batch=batch, rotation=make_rotation(0, True), scale=1.0,
            quantized=QuantizedKV(fmt),
        )  # fmt: skip
        found = run(case, impl)[0, :, 0]
        if part == 1:
            expected = torch.tensor(number / 2)
        elif not math.isfinite(number):
            continue  # such a score has no softmax
        else:
            expected = torch.tensor(number * float(query[0, 0, 0])).sigmoid()
        torch.testing.assert_close(
            found, expected.expand_as(found), rtol=2e-6, atol=0, equal_nan=True
        )


@of_all_formats
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("variant", ["plain", "window, alibi and softcap", "sinks", "reweighted"])
def test_reference_equals_dense_float64(workload, variant, fmt):
    case = fp8_case(fmt, 1, WORKLOADS[workload], **VARIANTS[variant])
    expected = dense_attention(in_float32(case)).float()
    torch.testing.assert_close(run(case, "reference"), expected, **TOLERANCE[torch.float32])


@of_all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_equals_reference(kernel, variant, dtype, fmt):
    for seed, requests in enumerate(WORKLOADS.values()):
        case = fp8_case(fmt, seed, requests, dtype=dtype, **VARIANTS[variant])
        torch.testing.assert_close(run(case, kernel), run(case, "reference"), **TOLERANCE[dtype])


@of_all_formats
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_kernel_head_sizes(kernel, head_size, fmt):
    case = fp8_case(fmt, head_size, WORKLOADS["mixed"], head_size=head_size)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, kernel), expected, **TOLERANCE[torch.float32])


@of_all_formats
@pytest.mark.parametrize("group_heads", range(1, 14))
def test_kernel_row_remainders(kernel, group_heads, fmt):
    case = fp8_case(fmt, group_heads, [(1, 40, [9]), (3, 4, [70])], group_heads=group_heads)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, kernel), expected, **TOLERANCE[torch.float32])


@of_all_formats
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("local", [{}, {"sinks": True}, {"reweighted": True}])
def test_splits_are_merged(cpu_kernel, threads, local, fmt):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        work = [(1, 700, [700, 30, 700]), (8, 700, [])]
        case = fp8_case(fmt, 3, work, num_kv_heads=1, **local)
        expected = run(case, "reference")
        torch.testing.assert_close(run(case, cpu_kernel), expected, **TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(before)


@of_all_formats
@pytest.mark.parametrize("workload", SHARED)
@pytest.mark.parametrize("variant", ["plain", "softcap", "window"])
def test_reading_together_equals_reading_alone(kernel, workload, variant, fmt):
    options = {"window": 50, "sinks": True} if variant == "window" else VARIANTS[variant]
    case = in_8_bits(shared_case(1, workload, **options), QuantizedKV(fmt, **SCALES))
    reads = shared_reads(case.batch)
    assert reads is not None
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, kernel, reads), expected, **TOLERANCE[torch.float32])


@of_all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_side_by_side_caches(dtype, fmt):
    """The layout of GPUs, with queries of all their dtypes."""
    case = make_case(1, WORKLOADS["mixed"], dtype=dtype, block_size=16, head_size=80)
    case.layout = Layout.SIDE_BY_SIDE
    case = in_8_bits(case, QuantizedKV(fmt, **SCALES))
    torch.testing.assert_close(run(case, "triton"), run(case, "reference"), **TOLERANCE[dtype])


@of_all_formats
def test_scales_scale(impl, fmt):
    """A key scale acts as one of the softmax, a value scale as one of the output."""
    plain = fp8_case(fmt, 2, WORKLOADS["choreographed prefill"], scales={"key_scale": 1.0})
    scaled = dataclasses.replace(plain, quantized=QuantizedKV(fmt, 3.0, 0.25))
    other = dataclasses.replace(plain, scale=3.0 * plain.scale)
    torch.testing.assert_close(run(scaled, impl), 0.25 * run(other, impl), atol=1e-6, rtol=1e-5)


def test_padding_is_never_read(impl):
    """What is no number in every slot that no span covers changes nothing."""
    case = fp8_case(torch.float8_e4m3fn, 5, [(4, 3, [21, 40])])
    table = torch.arange(24, dtype=torch.int32)[None]
    case.batch = dataclasses.replace(case.batch, block_table=table)
    expected = run(case, impl)
    first, size = case.batch.first_slot.tolist(), case.batch.num_tokens.tolist()
    used = {s for f, n in zip(first, size, strict=True) for s in range(f, f + n)}
    for slot in set(range(40 * 32)) - used:
        for view in (key_view, value_view):
            view(case.kv_cache)[slot // 32, :, slot % 32] = 0x7F
    torch.testing.assert_close(run(case, impl), expected, atol=0, rtol=0)


def test_what_is_refused(impl):
    case = fp8_case(torch.float8_e4m3fn, 6, WORKLOADS["mixed"])
    with pytest.raises(ValueError, match="quantized cache"):
        run(dataclasses.replace(case, kv_cache=torch.zeros(40, 2, 32, 128)), impl)
    with pytest.raises(ValueError, match=r"uint8|Byte"):
        run(dataclasses.replace(case, quantized=None), impl)
    latent = dataclasses.replace(case, layout=Layout.LATENT, value_size=32)
    with pytest.raises(ValueError, match="a latent cache is not quantized"):
        run(latent, impl)
    with pytest.raises(ValueError, match="cannot be rotated where they lie"):
        reposition_keys(case.kv_cache, ints([0]), ints([0]), torch.ones(1, 64), impl=impl)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_mean_nothing(scale):
    with pytest.raises(ValueError, match="value_scale"):
        QuantizedKV(torch.float8_e5m2, 1.0, scale)
    with pytest.raises(ValueError, match="dtype is"):
        QuantizedKV(torch.int8)


def test_xformers_has_no_way_for_it():
    pytest.importorskip("xformers")
    case = make_case(1, [(1, 40, [9])], dtype=torch.float16, block_size=16)
    case.layout = Layout.SIDE_BY_SIDE
    case = in_8_bits(case, QuantizedKV(torch.float8_e4m3fn))
    output = torch.zeros_like(case.query)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        span_attention(case.query, case.kv_cache, output, case.plan(), case.layer(), "xformers")
