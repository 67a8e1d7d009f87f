# SPDX-License-Identifier: Apache-2.0
"""Laws of repositioning: identity, inverse, composition, equal to fresh rotation, copies."""

import pytest
import torch

from tests.ops.cases import TOLERANCE, ints, make_cache, make_rotation, turn
from vllm_choreo.ops import Layout, reposition_keys
from vllm_choreo.ops.layout import key_view, read_kv, value_view, write_kv

VARIANTS = [(64, 64, True), (64, 64, False), (80, 32, True), (96, 96, True), (128, 16, False)]
DTYPES = [torch.float32, torch.bfloat16]


def label(variant):
    size, rotary_dim, is_neox = variant
    return f"size{size}-rotary{rotary_dim}-{'neox' if is_neox else 'interleaved'}"


@pytest.fixture(params=VARIANTS, ids=label)
def variant(request):
    torch.manual_seed(request.param[0])
    return request.param


def move(cache, src, dst, deltas, rotation, impl):
    cos_sin = rotation.cos_sin(ints(deltas))
    reposition_keys(cache, ints(src), ints(dst), cos_sin, rotation.is_neox, impl)


def test_identity(impl, variant):
    size, rotary_dim, is_neox = variant
    cache = make_cache(4, 2, 32, size, torch.float32)
    before = cache.clone()
    move(cache, [1, 3], [1, 3], [0, 0], make_rotation(rotary_dim, is_neox), impl)
    assert torch.equal(cache, before)


def test_inverse(impl, variant):
    size, rotary_dim, is_neox = variant
    rotation = make_rotation(rotary_dim, is_neox)
    cache = make_cache(4, 2, 32, size, torch.float32)
    before = cache.clone()
    move(cache, [1, 3], [1, 3], [1234, -7], rotation, impl)
    assert not torch.allclose(key_view(cache)[1], key_view(before)[1], atol=0.1)
    move(cache, [1, 3], [1, 3], [-1234, 7], rotation, impl)
    torch.testing.assert_close(cache, before, **TOLERANCE[torch.float32])


def test_composition(impl, variant):
    size, rotary_dim, is_neox = variant
    rotation = make_rotation(rotary_dim, is_neox)
    cache = make_cache(4, 2, 16, size, torch.float32)
    once = cache.clone()
    move(cache, [2], [2], [500], rotation, impl)
    move(cache, [2], [2], [-123], rotation, impl)
    move(once, [2], [2], [377], rotation, impl)
    torch.testing.assert_close(cache, once, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_equals_fresh_rotation(impl, variant, dtype):
    """Keys stored at 40 and moved by 960 equal the same keys stored at 1000."""
    size, rotary_dim, is_neox = variant
    rotation = make_rotation(rotary_dim, is_neox)
    raw, values = torch.randn(2, 32, 3, size).to(dtype)
    slots = torch.arange(32) + 32
    expected, cache = torch.zeros(2, 4, 3, 32, 2 * size).to(dtype)
    for target, position in ((expected, 1000), (cache, 40)):
        angles = (position + torch.arange(32.0).double())[:, None, None] * rotation.inv_freq
        write_kv(target, slots, turn(raw.double(), angles, is_neox).to(dtype), values)
    move(cache, [1], [1], [960], rotation, impl)
    for found, wanted in zip(read_kv(cache, slots), read_kv(expected, slots), strict=True):
        # bfloat16: stored keys are rounded once more than fresh ones.
        torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_copy_leaves_the_source_alone(impl, variant, dtype):
    size, rotary_dim, is_neox = variant
    rotation = make_rotation(rotary_dim, is_neox)
    cache = make_cache(6, 2, 32, size, dtype)
    before = cache.clone()
    # One source for two targets, and one block in place, in the same call.
    move(cache, [1, 1, 4], [0, 5, 4], [10, -20, 3], rotation, impl)
    for block in (1, 2, 3):
        assert torch.equal(cache[block], before[block])
    assert torch.equal(value_view(cache)[[0, 5, 4]], value_view(before)[[1, 1, 4]])
    in_place = before.clone()
    move(in_place, [1], [1], [-20], rotation, impl)
    assert torch.equal(cache[5], in_place[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_kernel_equals_reference(kernel, variant, dtype):
    size, rotary_dim, is_neox = variant
    rotation = make_rotation(rotary_dim, is_neox)
    cache = make_cache(9, 3, 32, size, dtype)
    twin = cache.clone()
    for target, impl in ((cache, kernel), (twin, "reference")):
        move(target, [1, 2, 3, 4], [5, 2, 7, 8], [9, -4000, 0, 77], rotation, impl)
    torch.testing.assert_close(cache, twin, **TOLERANCE[dtype])


def test_nothing_to_move(impl):
    cache = make_cache(2, 1, 16, 32, torch.float32)
    before = cache.clone()
    move(cache, [], [], [], make_rotation(32, True), impl)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("sizes", [(96, 48, 32), (576, 512, 64)], ids=str)
def test_of_a_latent_row_the_columns_behind_the_value_rotate(impl, sizes, is_neox, dtype):
    """Against complex numbers, token by token; in place and as a copy."""
    size, value_size, rotary_dim = sizes
    torch.manual_seed(size)
    rotation = make_rotation(rotary_dim, is_neox)
    cache = make_cache(6, 1, 16, size, dtype, is_latent=True)
    before, expected = cache.clone(), cache.clone()
    moves = [(1, 0, 900), (1, 5, -20), (4, 4, 3)]
    for src, dst, delta in moves:
        rotated = turn(before[src, ..., value_size:].double(), delta * rotation.inv_freq, is_neox)
        expected[dst, ..., :value_size] = before[src, ..., :value_size]
        expected[dst, ..., value_size:] = rotated.to(dtype)
    src, dst, deltas = (ints(list(column)) for column in zip(*moves, strict=True))
    cos_sin = rotation.cos_sin(deltas)
    reposition_keys(cache, src, dst, cos_sin, is_neox, impl, Layout.LATENT, value_size)
    torch.testing.assert_close(cache, expected, **TOLERANCE[dtype])
    assert torch.equal(cache[[1, 2, 3]], before[[1, 2, 3]])
    assert torch.equal(cache[..., :value_size], expected[..., :value_size])
