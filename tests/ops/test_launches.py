# SPDX-License-Identifier: Apache-2.0
"""Launches that layers and steps have in common: the same results, and the same arguments."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.grids import sampled
from tests.ops.cases import GPU, TOLERANCE, make_case, run
from tests.ops.test_triton import tiles_of
from vllm_choreo.ops import Layout, SpanPlan, plan_shared_reads, span_attention

WORKLOAD = [(1, 70, [50, 30]), (3, 20, [50])]


def ran(case, plan: SpanPlan, layer) -> torch.Tensor:
    output = torch.zeros_like(case.query, device=GPU)
    span_attention(case.query.to(GPU), case.kv_cache.to(GPU), output, plan, layer, "triton")
    return output.cpu()


@pytest.mark.parametrize("layout", [Layout.KEYS_TRANSPOSED, Layout.SIDE_BY_SIDE])
def test_layers_that_look_alike_share_launches(layout):
    case = make_case(1, WORKLOAD)
    case.layout = layout
    plan = case.plan(tiles=tiles_of(case), device=GPU)
    for seed in range(3):
        torch.manual_seed(seed)
        case.query, case.kv_cache = torch.randn_like(case.query), torch.randn_like(case.kv_cache)
        found = ran(case, plan, case.layer(GPU))
        torch.testing.assert_close(found, run(case, "reference"), **TOLERANCE[torch.float32])
    assert len(plan.launches) == 1


@pytest.mark.parametrize(
    "change", sampled(["scale", "stride", "softcap", "window", "rows", "alignment"], 2)
)
def test_layers_that_do_not_look_alike_share_none(change):
    case = make_case(2, WORKLOAD)
    plan = case.plan(tiles=tiles_of(case), device=GPU)
    ran(case, plan, case.layer(GPU))
    layer, query = case.layer(GPU), case.query
    if change == "scale":
        layer = dataclasses.replace(layer, scale=0.5 * layer.scale)
    elif change == "softcap":
        layer = dataclasses.replace(layer, softcap=2.0)
    elif change == "window":
        layer = dataclasses.replace(layer, window=30)
    elif change == "rows":
        query = torch.cat([query, torch.zeros_like(query[:1])])
    elif change == "stride":
        query = torch.cat([query, query], dim=2)[..., : query.shape[2]]
    else:
        query = torch.cat([query.flatten()[:1], query.flatten()])[1:].view(query.shape)
    output, again = (torch.zeros(query.shape, device=GPU) for _ in range(2))
    span_attention(query.to(GPU), case.kv_cache.to(GPU), output, plan, layer, "triton")
    fresh = case.plan(tiles=tiles_of(case), device=GPU)
    span_attention(query.to(GPU), case.kv_cache.to(GPU), again, fresh, layer, "triton")
    torch.testing.assert_close(output, again, rtol=0.0, atol=0.0)
    assert len(plan.launches) == 2


def test_later_steps_of_the_same_tiles_share_launches():
    """Own spans have grown, and the block table lies elsewhere, with other blocks."""
    case = make_case(3, WORKLOAD)
    tiles = tiles_of(case)
    first = case.plan(tiles=tiles, device=GPU)
    ran(case, first, case.layer(GPU))
    batch, own = case.batch, case.batch.span_start_loc[1:].long() - 1
    num_tokens = batch.num_tokens.clone()
    num_tokens[own] += 5
    order = torch.randperm(len(case.kv_cache), dtype=torch.int32)
    table = order[batch.block_table.long()]
    case.batch = dataclasses.replace(batch, num_tokens=num_tokens, block_table=table)
    case.kv_cache = torch.randn_like(case.kv_cache)
    grown = tiles.with_own_tokens(num_tokens[own].to(GPU))
    spans = dataclasses.replace(first.spans, num_tokens=num_tokens, block_table=table.to(GPU))
    second = dataclasses.replace(first, spans=spans, tiles=grown)
    found = ran(case, second, case.layer(GPU))
    torch.testing.assert_close(found, run(case, "reference"), **TOLERANCE[torch.float32])
    assert second.launches is first.launches and len(first.launches) == 1


def test_plans_of_other_weights_share_no_launches():
    case = make_case(4, WORKLOAD, reweighted=True)
    plan = case.plan(tiles=tiles_of(case, plan_shared_reads(case.batch)), device=GPU)
    for number in range(3):
        weights = plan.spans.reweighting
        temperature = (0.8 + 0.1 * number) * weights.temperature
        other = dataclasses.replace(weights, temperature=temperature)
        plan = dataclasses.replace(plan, spans=dataclasses.replace(plan.spans, reweighting=other))
        kept = dataclasses.replace(case.batch.reweighting, temperature=temperature.cpu())
        case.batch = dataclasses.replace(case.batch, reweighting=kept)
        found = ran(case, plan, case.layer(GPU))
        torch.testing.assert_close(found, run(case, "reference"), **TOLERANCE[torch.float32])
    assert len(plan.tiles.launches) == 3


_SCRIPT = """
import torch, triton
from tools.gpu_check import launches as checked
from tools.gpu_check.shapes import AttentionShape
from vllm_choreo.ops import LayerAttention, Layout, SpanPlan, plan_shared_reads, span_attention
from vllm_choreo.ops.triton import launches, make_tiles

told = []

class Driver(checked._AbsentGPU):
    utils = property(lambda self: self)

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *given):
        return object(), "function", 128, 0, 1024

    def launcher_cls(self, source, metadata):
        is_constant = [kind == "constexpr" for kind in source.signature.values()]

        def launch(x, y, z, stream, function, metadata, about, enter, leave, *args):
            shown = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
            told.append((source.fn.__name__, (x, y, z), stream, function, metadata, shown))
            assert len(is_constant) == len(args)

        return launch

triton.runtime.driver.set_active(Driver(90))
for shape in SHAPES:
    batch, heads = checked._batch(shape), (shape.num_heads, shape.num_kv_heads)
    cos_sin = checked._rotation(shape).cos_sin(batch.position_delta)
    reads = plan_shared_reads(batch, min_tokens=1)
    sizes = dict(num_heads=heads[0], num_kv_heads=heads[1], head_size=shape.head_size)
    tiles = make_tiles(batch, reads, **sizes, dtype=shape.dtype, device="cpu")
    plan = SpanPlan(batch, cos_sin, reads, tiles, torch.zeros(10**7))
    num_queries = int(batch.query_start_loc[-1])

    def layer():
        floats = [torch.rand(heads[0]) if given else None for given in (shape.alibi, shape.sinks)]
        how = LayerAttention(0.1, softcap=shape.softcap, alibi_slopes=floats[0], sinks=floats[1],
                             layout=Layout.SIDE_BY_SIDE)
        wide = torch.zeros(num_queries, heads[0], 3 * shape.head_size, dtype=shape.dtype)
        output = torch.zeros(num_queries, heads[0], shape.head_size, dtype=shape.dtype)
        return wide[..., : shape.head_size], checked._kv_cache(shape), output, how

    layers = [layer() for _ in range(3)]
    # By Triton alone; by the kernels that the first layer finds; by those that are known.
    found = []
    for step in range(3):
        told.clear()
        for query, cache, output, how in layers:
            if step == 0:
                launches._compiled.clear(), tiles.launches.clear()
            span_attention(query, cache, output, plan, how, "triton")
        found.append([*told])
        if step == 1:
            assert all(x.is_prepared for x in plan.launches.values()) and len(plan.launches) == 1
            tiles.launches.clear()
    assert found[0] == found[1] == found[2], found
    assert len({name for name, *_ in found[0]}) == 2 and len(found[0]) >= 9

    hooked = []
    triton.knobs.runtime.launch_enter_hook.add(hooked.append)
    told.clear()
    span_attention(*layers[1][:3], plan, layers[1][3], "triton")
    triton.knobs.runtime.launch_enter_hook.calls.clear()
    assert told == found[0][len(told) : 2 * len(told)]
print("GOOD")
"""
_SHAPES = {
    "sinks and soft cap": "AttentionShape(4, 2, 32, sinks=True, softcap=5.0)",
    "alibi": "AttentionShape(4, 2, 32, torch.float16, alibi=True, reweighted=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", sampled(_SHAPES, 1))
def test_the_driver_is_told_the_same(shape):
    """As by a launch of Triton's own; kernels are compiled, and the driver launches nothing."""
    script = _SCRIPT.replace("SHAPES:", f"[{_SHAPES[shape]}]:")
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.stdout.endswith("GOOD\n"), done.stderr[-3000:]
