# SPDX-License-Identifier: Apache-2.0
"""Reference against a dense float64 computation; kernels against the reference; equivalences."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.cases import TOLERANCE, dense_attention, ints, make_case, run
from vllm_choreo.ops import SpanBatch, cpu, span_attention
from vllm_choreo.ops.layout import key_view, value_view

# (q_len, own tokens computed before, lengths of the parents)
WORKLOADS = {
    "ordinary decode": [(1, 99, []), (1, 0, []), (1, 260, [])],
    "ordinary prefill": [(70, 0, []), (33, 64, [])],
    "choreographed decode": [(1, 5, [40, 7, 130])],
    "choreographed prefill": [(50, 0, [17, 200]), (5, 0, [1])],
    "chunked prefill": [(40, 60, [33, 64])],
    "mixed": [(1, 300, []), (9, 2, [20, 20, 5]), (0, 4, [3]), (64, 0, []), (1, 0, [500])],
}
_ONE_KV_HEAD = {"num_kv_heads": 1, "group_heads": 5}
VARIANTS = {
    "plain": {},
    "interleaved": {"is_neox": False},
    "partial rotary": {"rotary_dim": 16},
    "no rotary": {"rotary_dim": 0},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True, "rotary_dim": 0},
    "alibi, softcap and interleaved": {"alibi": True, "softcap": 20.0, "is_neox": False},
    "one head each": {"group_heads": 1},
    "many heads each": {"num_kv_heads": 1, "group_heads": 14},
    "window": {"window": 60},
    "window, alibi and softcap": {"window": 200, "alibi": True, "softcap": 5.0},
    "sinks": {"sinks": True},
    "reweighted": {"reweighted": True},
    "reweighted, softcap and sinks": {"reweighted": True, "softcap": 5.0, "sinks": True},
    "reweighted, alibi and window": {"reweighted": True, "alibi": True, "window": 90},
    "window of one and sinks": {"window": 1, "sinks": True},
    "block of 128": {"block_size": 128},
    "block of 16": {"block_size": 16},
    "latent": {"head_size": 80, "value_size": 48, "rotary_dim": 32, **_ONE_KV_HEAD},
    "latent of DeepSeek": {
        "head_size": 576, "value_size": 512, "rotary_dim": 64, "is_neox": False, "block_size": 16,
        **_ONE_KV_HEAD,
    },
    # More query heads than rows of a tile on GPUs.
    "latent, many heads": {
        "head_size": 80, "value_size": 48, "rotary_dim": 32, "num_kv_heads": 1, "group_heads": 96,
    },
    "latent, no rotary": {"head_size": 80, "value_size": 64, "rotary_dim": 0, **_ONE_KV_HEAD},
    "latent, rotary in part": {
        "head_size": 96, "value_size": 48, "rotary_dim": 32, "reweighted": True, **_ONE_KV_HEAD
    },
}  # fmt: skip
HEAD_SIZES = [32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "variant",
    ["plain", "interleaved", "partial rotary", "softcap", "alibi", "window",
     "window, alibi and softcap", "sinks", "window of one and sinks", "reweighted",
     "reweighted, softcap and sinks", "reweighted, alibi and window", "latent",
     "latent of DeepSeek", "latent, no rotary", "latent, rotary in part"],
)  # fmt: skip
def test_reference_equals_dense_float64(workload, variant):
    case = make_case(1, WORKLOADS[workload], **VARIANTS[variant])
    expected = dense_attention(case).float()
    torch.testing.assert_close(run(case, "reference"), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_equals_reference(kernel, variant, dtype):
    for seed, requests in enumerate(WORKLOADS.values()):
        case = make_case(seed, requests, dtype=dtype, **VARIANTS[variant])
        torch.testing.assert_close(run(case, kernel), run(case, "reference"), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_kernel_head_sizes(kernel, head_size, dtype):
    case = make_case(head_size, WORKLOADS["mixed"], dtype=dtype, head_size=head_size)
    torch.testing.assert_close(run(case, kernel), run(case, "reference"), **TOLERANCE[dtype])


@pytest.mark.parametrize("group_heads", range(1, 14))
def test_kernel_row_remainders(kernel, group_heads):
    case = make_case(group_heads, [(1, 40, [9]), (3, 4, [70])], group_heads=group_heads)
    expected = run(case, "reference")
    torch.testing.assert_close(run(case, kernel), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "local", [{}, {"sinks": True}, {"window": 650, "sinks": True}, {"reweighted": True}]
)
def test_splits_are_merged(cpu_kernel, threads, local):
    """A long decode is split over threads, also where a split sees nothing of the own span."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = make_case(3, [(1, 700, [700, 30, 700]), (8, 700, [])], num_kv_heads=1, **local)
        expected = run(case, "reference")
        torch.testing.assert_close(run(case, cpu_kernel), expected, **TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(before)


def test_extreme_scores_stay_finite(kernel):
    case = make_case(4, WORKLOADS["mixed"])
    case.query *= 300.0
    result = run(case, kernel)
    assert result.isfinite().all()
    torch.testing.assert_close(result, run(case, "reference"), atol=2e-4, rtol=2e-4)


def test_padding_is_never_read(impl):
    """NaN in every slot that no span covers, and in rows beyond the batch, changes nothing."""
    case = make_case(5, [(4, 3, [21, 40])])
    first, size = case.batch.first_slot.tolist(), case.batch.num_tokens.tolist()
    table = torch.arange(24, dtype=torch.int32)[None]
    case.batch = dataclasses.replace(case.batch, block_table=table)
    expected = run(case, impl)
    used = {s for f, n in zip(first, size, strict=True) for s in range(f, f + n)}
    for slot in set(range(40 * 32)) - used:
        key_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
        value_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
    torch.testing.assert_close(run(case, impl), expected, atol=0, rtol=0)


def test_strided_and_flat_tensors(impl):
    """Queries cut out of a fused projection, outputs [tokens, heads * size], extra rows."""
    case = make_case(6, WORKLOADS["chunked prefill"])
    expected = run(case, impl)
    tokens, heads, size = case.query.shape
    fused = torch.randn(tokens + 2, 2 * heads * size)
    fused[:tokens, : heads * size] = case.query.flatten(1)
    query = fused[:, : heads * size].unflatten(1, (heads, size))
    output = torch.full((tokens + 2, heads * size), 7.0)
    span_attention(query, case.kv_cache, output, case.plan(), case.layer(), impl)
    torch.testing.assert_close(output[:tokens].view_as(expected), expected)
    assert (output[tokens:] == 7.0).all()


@pytest.mark.parametrize("q_len", [1, 150])
@pytest.mark.parametrize("window", [1, 31, 64])
def test_a_window_reads_what_is_in_it(kernel, window, q_len):
    """NaN in every token that no query sees changes nothing: neither parents nor own tokens."""
    case = make_case(10, [(q_len, 200, [300, 90, 40])], window=window)
    table = torch.arange(40, dtype=torch.int32)[None]
    # Seen left of the window, across its edge, and to the right of all queries.
    changed = {
        "block_table": table, "first_slot": ints([3, 310, 401, 450]),
        "stored_position": ints([0, 0, 0, 400]), "position_delta": ints([0, -520, -900, 0]),
    }  # fmt: skip
    case.batch = dataclasses.replace(case.batch, **changed)
    expected = run(case, kernel)
    torch.testing.assert_close(expected, run(case, "reference"), **TOLERANCE[torch.float32])
    hidden = [3 + t for t in range(300)]
    hidden += [310 + t for t in range(90) if 520 + t <= 600 - window]
    hidden += [450 + t for t in range(200) if t <= 200 - window]
    for slot in hidden:
        key_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
        value_view(case.kv_cache)[slot // 32, :, slot % 32] = float("nan")
    torch.testing.assert_close(run(case, kernel), expected, atol=0, rtol=0)


def test_a_sink_is_a_key_without_value(impl):
    """As one parent token more, of a key that scores zero with every query."""
    case = make_case(11, [(5, 20, [40]), (1, 3, [50, 9])])
    table = torch.arange(24, dtype=torch.int32).repeat(2, 1)
    first_slot = ints([0, 100, 200, 300, 350])
    batch = dataclasses.replace(case.batch, block_table=table, first_slot=first_slot)
    case.batch, case.sinks = batch, torch.zeros(6)
    expected = run(case, impl)
    more = ints([1, 0, 1, 0, 0])
    for slot in (first_slot + batch.num_tokens)[more == 1].tolist():
        key_view(case.kv_cache)[slot // 32, :, slot % 32] = 0.0
        value_view(case.kv_cache)[slot // 32, :, slot % 32] = 0.0
    case.batch = dataclasses.replace(batch, num_tokens=batch.num_tokens + more)
    case.sinks = None
    torch.testing.assert_close(run(case, impl), expected, **TOLERANCE[torch.float32])


def test_parents_commute(impl):
    """The order of a request's parents does not matter."""
    case = make_case(7, [(6, 0, [30, 12, 55])])
    order = torch.tensor([2, 0, 1, 3])
    fields = ("first_slot", "num_tokens", "stored_position", "position_delta")
    changed = {name: getattr(case.batch, name)[order].clone() for name in fields}
    other = dataclasses.replace(case, batch=dataclasses.replace(case.batch, **changed))
    torch.testing.assert_close(run(case, impl), run(other, impl), **TOLERANCE[torch.float32])


def test_one_span_equals_two(impl):
    """Splitting the computed tokens of an ordinary request off as a parent changes nothing."""
    table = torch.randperm(40, dtype=torch.int32)[None, :24]
    whole = make_case(8, [(10, 90, [])], alibi=True)
    whole.batch = SpanBatch(ints([0, 10]), table, ints([0, 1]), ints([0]), ints([100]), ints([0]),
                            ints([0]), 32)  # fmt: skip
    parts = SpanBatch(ints([0, 10]), table, ints([0, 2]), ints([0, 71]), ints([71, 29]),
                      ints([0, 71]), ints([0, 0]), 32)  # fmt: skip
    split = dataclasses.replace(whole, batch=parts)
    torch.testing.assert_close(run(whole, impl), run(split, impl), **TOLERANCE[torch.float32])


def test_batch_equals_requests_one_by_one(impl):
    case = make_case(9, WORKLOADS["mixed"])
    together = run(case, impl)
    starts, spans = case.batch.query_start_loc.tolist(), case.batch.span_start_loc.tolist()
    for r in range(case.batch.num_reqs):
        rows, cut = slice(starts[r], starts[r + 1]), slice(spans[r], spans[r + 1])
        b = case.batch
        alone = SpanBatch(
            ints([0, rows.stop - rows.start]), b.block_table[r : r + 1],
            ints([0, cut.stop - cut.start]), b.first_slot[cut].clone(), b.num_tokens[cut].clone(),
            b.stored_position[cut].clone(), b.position_delta[cut].clone(), b.block_size,
        )  # fmt: skip
        single = dataclasses.replace(case, batch=alone, query=case.query[rows])
        torch.testing.assert_close(run(single, impl), together[rows], atol=1e-6, rtol=1e-6)


def test_one_openmp_runtime():
    """The extension must use torch's threads, not start a second pool.

    In a process of its own: other libraries that tests load bring runtimes of theirs.
    """
    if cpu.unavailable_reason() is not None:
        pytest.skip("the C++ kernels are not built")
    script = "from vllm_choreo.ops import default_impl; default_impl()\n"
    script += "print(open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    names = {Path(line.split()[-1]).name for line in done.stdout.splitlines() if "/" in line}
    assert any(name.startswith("_C.cpython") for name in names)
    runtimes = [n for n in names if n.startswith(("libgomp", "libiomp", "libomp"))]
    assert len(runtimes) == 1, runtimes
