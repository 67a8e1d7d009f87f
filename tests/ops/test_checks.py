# SPDX-License-Identifier: Apache-2.0
"""What is refused, the mask, the default implementation, and detection of the layout."""

import dataclasses
import logging
import math

import pytest
import torch

from tests.ops.cases import ints, make_cache, make_case, make_rotation
from vllm_choreo.ops import (
    Rotation,
    SpanBatch,
    UnsupportedLayoutError,
    cpu,
    default_impl,
    detect_layout,
    reposition_keys,
    span_attention,
)
from vllm_choreo.ops.layout import Layout, write_kv


def small_batch(**changes) -> SpanBatch:
    """Request 0: parents of 2 and 1 tokens, 3 own, 2 queries. Request 1: 2 own, 1 query."""
    fields = {
        "query_start_loc": ints([0, 2, 3]),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "span_start_loc": ints([0, 3, 4]),
        "first_slot": ints([5, 16, 32, 0]),
        "num_tokens": ints([2, 1, 3, 2]),
        "stored_position": ints([0, 7, 32, 0]),
        "position_delta": ints([4, -3, 0, 0]),
        "block_size": 16,
    }
    return SpanBatch(**{**fields, **changes})


BAD_BATCHES = {
    "own span.*must be 0": {"position_delta": ints([0, 0, 1, 0])},
    "leave empty spans out": {"num_tokens": ints([0, 1, 3, 2])},
    "query tokens but its own span": {"num_tokens": ints([2, 1, 1, 2])},
    "covers slots 63..64": {"first_slot": ints([63, 16, 32, 0])},
    "covers slots -1..0": {"first_slot": ints([-1, 16, 32, 0])},
    "block ids 9..9": {"block_table": torch.full((2, 4), 9, dtype=torch.int32)},
    "make it torch.int32": {"first_slot": torch.zeros(4, dtype=torch.int64)},
    "num_tokens has shape": {"num_tokens": ints([2, 1, 3])},
    "block_table is": {"block_table": torch.zeros(3, 4, dtype=torch.int32)},
    "query_start_loc must begin": {"query_start_loc": ints([1, 2, 3])},
    "query_start_loc goes from 2 to 1": {"query_start_loc": ints([0, 2, 1])},
    "span_start_loc goes from 3 to 3": {"span_start_loc": ints([0, 3, 3])},
    "there are 4 spans": {"span_start_loc": ints([0, 2, 3])},
    "block_size is 0": {"block_size": 0},
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_bad_batches_are_refused(message):
    small_batch().validate(num_blocks=1)
    with pytest.raises(ValueError, match=message):
        small_batch(**BAD_BATCHES[message]).validate(num_blocks=1)


def test_mask():
    rows = ["11111000", "11111100", "00000011"]
    expected = torch.tensor([[c == "1" for c in row] for row in rows])
    assert torch.equal(small_batch().materialize_mask(), expected)


BAD_ARGUMENTS = {
    "head size": {"kv_cache": torch.zeros(4, 2, 32, 64)},
    "query heads": {"kv_cache": torch.zeros(4, 4, 32, 128)},
    "block size 64, the batch 32": {"kv_cache": torch.zeros(4, 2, 64, 128)},
    "must be the same|differ in dtype": {"kv_cache": torch.zeros(4, 2, 32, 128).bfloat16()},
    "contiguous within": {"kv_cache": torch.zeros(4, 2, 128, 32).transpose(2, 3)},
    "output has": {"output": torch.zeros(3, 6, 64)},
    "use 0 for none": {"softcap": -1.0},
    "window is 0; use None for none": {"window": 0},
    r"sinks .* \[(6|num_heads)\]": {"sinks": torch.zeros(7)},
    r"alibi_slopes .* \[(6|num_heads)\]": {"alibi_slopes": torch.zeros(5)},
    "cos_sin (is|must be)": {"cos_sin": torch.zeros(1, 64)},
    "rotary_dim": {"cos_sin": torch.zeros(2, 66)},
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(message, impl):
    case = make_case(1, [(4, 0, [5])])
    arguments = {
        "query": case.query, "kv_cache": case.kv_cache, "output": torch.zeros_like(case.query),
        "plan": case.plan(), "layer": case.layer(), "impl": impl,
    }  # fmt: skip
    span_attention(**arguments)
    for name, bad in BAD_ARGUMENTS[message].items():
        owner = next((o for o in ("plan", "layer") if hasattr(arguments[o], name)), None)
        if owner is None:
            arguments[name] = bad
        else:
            arguments[owner] = dataclasses.replace(arguments[owner], **{name: bad})
    with pytest.raises(ValueError, match=message):
        span_attention(**arguments)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("value_size is None", {"value_size": None}),
        ("value_size is 48 and the layout", {"layout": Layout.KEYS_TRANSPOSED}),
        ("value_size is 96|at most that", {"value_size": 96}),
        ("output has|output and kv_cache differ", {"value_size": 64}),
        ("rotary_dim", {"value_size": 64, "output": 64}),
    ],
)
def test_latent_caches_need_a_size_of_values_that_fits(message, changes, impl):
    """Keys of 80 numbers begin with values of 48, behind which 32 rotate."""
    changes = dict(changes)
    options = {"head_size": 80, "value_size": 48, "rotary_dim": 32, "num_kv_heads": 1}
    case = make_case(1, [(4, 0, [5])], **options)
    output = torch.zeros(*case.query.shape[:2], changes.pop("output", 48))
    layer = dataclasses.replace(case.layer(), **changes)
    with pytest.raises(ValueError, match=message):
        span_attention(case.query, case.kv_cache, output, case.plan(), layer, impl)


def test_unknown_implementation_is_refused():
    case = make_case(1, [(4, 0, [5])])
    with pytest.raises(ValueError, match="choose 'reference', 'cpu', 'triton', 'xformers' or None"):
        span_attention(
            case.query, case.kv_cache, case.query.clone(), case.plan(), case.layer(), "fast"
        )


def test_kernel_refuses_what_it_cannot_run(cpu_kernel):
    case = make_case(1, [(4, 0, [5])])
    output = torch.zeros_like(case.query)

    def call(cache, query=case.query, batch=case.batch):
        out, plan = output.to(query.dtype), dataclasses.replace(case.plan(), spans=batch)
        span_attention(query, cache, out, plan, case.layer(), cpu_kernel)

    with pytest.raises(ValueError, match="float32 and bfloat16"):
        call(case.kv_cache.double(), case.query.double())
    with pytest.raises(IndexError, match="lies outside the cache of 40 blocks"):
        table = torch.full_like(case.batch.block_table, 40)
        call(case.kv_cache, batch=dataclasses.replace(case.batch, block_table=table))
    with pytest.raises(IndexError, match="beyond its block table"):
        slots = torch.full_like(case.batch.first_slot, 10_000)
        call(case.kv_cache, batch=dataclasses.replace(case.batch, first_slot=slots))
    with pytest.raises(ValueError, match="multiple of 16, not 8"):
        wide = case.batch.block_table.repeat(1, 4)
        batch = dataclasses.replace(case.batch, block_size=8, block_table=wide)
        call(torch.zeros(40, 2, 8, 128), batch=batch)
    with pytest.raises(ValueError, match="available_isas"):
        cpu.use_isa("abacus")


@pytest.mark.parametrize(
    ("message", "src", "dst"),
    [
        ("names a block twice", [0, 1], [2, 2]),
        (r"blocks \[1\] are read by one entry", [0, 1], [1, 2]),
        ("block ids must lie in 0..3", [0], [4]),
        ("block ids must lie in 0..3", [-1], [1]),
        ("2 source blocks but 1", [0, 1], [2]),
    ],
)
def test_bad_moves_are_refused(message, src, dst):
    cache = make_cache(4, 1, 16, 32, torch.float32)
    cos_sin = make_rotation(32, True).cos_sin(ints(src))
    with pytest.raises(ValueError, match=message):
        reposition_keys(cache, ints(src), ints(dst), cos_sin)


def test_rotation_angles_are_exact_at_large_deltas():
    rotation = Rotation(torch.tensor([1.0, 0.25], dtype=torch.float64), is_neox=True)
    found = rotation.cos_sin(ints([0, -1_000_000]))
    assert found.dtype == torch.float32 and rotation.rotary_dim == 4
    angles = (-1e6, -2.5e5)
    wanted = torch.tensor([[1.0, 1.0, 0.0, 0.0], [*map(math.cos, angles), *map(math.sin, angles)]])
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=0)


def test_default_impl_warns_once_without_the_kernels(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "not built")
    default_impl.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert default_impl() == "reference" and default_impl() == "reference"
        assert len(caplog.records) == 1 and "not built" in caplog.text
        case = make_case(1, [(1, 0, [])])
        with pytest.raises(RuntimeError, match="not built"):
            span_attention(
                case.query, case.kv_cache, case.query.clone(), case.plan(), case.layer(), "cpu"
            )
    finally:
        default_impl.cache_clear()


def detect(write_fn, dtype=torch.float32) -> str:
    return detect_layout(write_fn, num_kv_heads=3, head_size=64, block_size=32, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_layout_is_detected(dtype):
    assert detect(lambda k, v, cache, slots: write_kv(cache, slots, k, v), dtype) is (
        Layout.KEYS_TRANSPOSED
    )


def test_other_layouts_are_named():
    def plain(k, v, cache, slots):
        halves = cache.view(4, 3, 2, 32, 64)
        halves[slots // 32, :, 0, slots % 32] = k
        halves[slots // 32, :, 1, slots % 32] = v

    def side_by_side(k, v, cache, slots):
        cache[slots // 32, :, slots % 32] = torch.cat([k, v], dim=-1)

    def packed(k, v, cache, slots):
        write_kv(cache, slots, k, v)
        cache.copy_(cache.view(4, 3, -1, 2).transpose(-1, -2).reshape(cache.shape))

    def scaled(k, v, cache, slots):
        write_kv(cache, slots, k * 0.5, v)

    for write_fn, name in [
        (plain, "row by row"),
        (side_by_side, "side by side"),
        (packed, "AMX"),
        (scaled, "quantized"),
        (lambda *_: None, "nothing"),
    ]:
        with pytest.raises(UnsupportedLayoutError, match=name):
            detect(write_fn)
    with pytest.raises(UnsupportedLayoutError, match="dtype='float32'"):
        detect(packed, torch.bfloat16)
