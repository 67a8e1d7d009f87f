# SPDX-License-Identifier: Apache-2.0
"""The calls that launch the kernels, which here compile them and launch nothing.

So every constant, alignment and number of warps is that of a real launch. Not where Triton was
imported to interpret kernels (`TRITON_INTERPRET`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tools.gpu_check.shapes import AttentionShape
from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    Reweighting,
    Rotation,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    reposition_keys,
    span_attention,
)
from vllm_choreo.ops.flash_prefills import plan_prefills
from vllm_choreo.ops.triton.prefills import attend_prefills
from vllm_choreo.ops.triton.tuning import arch_of

_PARENT_BLOCKS = 32  # of the message that all requests read


@dataclass(frozen=True)
class Launch:
    """A launch that was compiled.

    Attributes:
        kernel: its name.
        constants: keyword arguments of the launch.
        compiled: what Triton made of it, or raised.
    """

    kernel: str
    constants: Mapping[str, Any]
    compiled: CompiledKernel | Exception


class _AbsentGPU:
    """As much of a driver of Triton's as compiling takes."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches(shape: AttentionShape, arch: int) -> list[Launch]:
    """Compile all that a layer of a shape launches, each kernel once.

    Args:
        arch: compute capability without the point: 90 for an H100.
    """
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_AbsentGPU(arch))
    arch_of.cache_clear()
    with _launches_only_compile() as found:
        _launch_attention(shape)
        if not shape.prefills:
            _launch_moves(shape)
    for kernel, _ in found:
        kernel.device_caches.clear()  # they go by device, not by target
    by_hash: dict[object, Launch] = {}
    for _, launch in found:
        compiled = launch.compiled
        key = id(compiled) if isinstance(compiled, Exception) else compiled.hash
        by_hash.setdefault(key, launch)
    return list(by_hash.values())


@contextmanager
def _launches_only_compile() -> Iterator[list[tuple[JITFunction, Launch]]]:
    found: list[tuple[JITFunction, Launch]] = []
    launch = JITFunction.__getitem__

    def compile_only(kernel: JITFunction, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            compiled: CompiledKernel | Exception
            try:
                compiled = kernel.run(*args, grid=grid, warmup=True, **constants)
            except Exception as error:
                compiled = error
            found.append((kernel, Launch(kernel.__name__.lstrip("_"), constants, compiled)))

        return run

    JITFunction.__getitem__ = compile_only
    try:
        yield found
    finally:
        JITFunction.__getitem__ = launch


def _launch_attention(shape: AttentionShape) -> None:
    batch = _batch(shape)
    rotation = _rotation(shape)
    # As vLLM cuts them: queries out of the product with keys and values, the output by itself.
    widths = [shape.num_heads * shape.head_size] + 2 * [shape.num_kv_heads * shape.head_size]
    if shape.value_size is not None:
        widths = widths[:1]  # of parts that were put together
    product = torch.zeros(int(batch.query_start_loc[-1]), sum(widths), dtype=shape.dtype)
    query = product.split(widths, 1)[0].view(-1, shape.num_heads, shape.head_size)
    layer = LayerAttention(
        scale=shape.head_size**-0.5,
        is_neox=shape.is_neox,
        softcap=shape.softcap,
        alibi_slopes=torch.rand(shape.num_heads) if shape.alibi else None,
        window=shape.window,
        sinks=torch.rand(shape.num_heads) if shape.sinks else None,
        layout=_layout(shape),
        value_size=shape.value_size,
    )
    cos_sin = rotation.cos_sin(batch.position_delta) if shape.rotary_dim != 0 else None
    plan = SpanPlan(batch, cos_sin, plan_shared_reads(batch, min_tokens=1))
    output = torch.zeros(*query.shape[:2], shape.value_size or shape.head_size, dtype=shape.dtype)
    if shape.prefills:
        own_tokens = batch.num_tokens[batch.span_start_loc[1:].long() - 1]
        prefills = plan_prefills(batch, batch.num_reqs - 1, _attend_nothing, own_tokens, 1000)
        plan = replace(plan, prefills=prefills)
        attend_prefills(query, _kv_cache(shape), output, plan, layer)
    else:
        span_attention(query, _kv_cache(shape), output, plan, layer, "triton")


def _attend_nothing(*, q: torch.Tensor, out: torch.Tensor, **given: Any) -> Any:
    """As FlashAttention, which is compiled elsewhere."""
    return out, torch.zeros(q.shape[1], q.shape[0])


def _launch_moves(shape: AttentionShape) -> None:
    cache, turns = _kv_cache(shape), _rotation(shape).cos_sin(_ints([5]))
    for target in (1, 2):  # in place, and into a copy
        reposition_keys(
            *(cache, _ints([1]), _ints([target]), turns, shape.is_neox),
            *("triton", _layout(shape), shape.value_size),
        )


def _batch(shape: AttentionShape) -> SpanBatch:
    """A step with tiles of every size, some of them split and merged.

    Of four requests that read one message two decode, one has some and one has many queries.
    """
    group, size = shape.num_heads // shape.num_kv_heads, shape.block_size
    lengths = [1, 1, max(1, 33 // group), max(2, 300 // group)]
    num_parent, width = _PARENT_BLOCKS * size, 96
    own = [range(_PARENT_BLOCKS + 40 * r, _PARENT_BLOCKS + 40 * r + 40) for r in range(4)]
    rows = [[*range(_PARENT_BLOCKS), *blocks] for blocks in own]
    table = _ints([row + [0] * (width - len(row)) for row in rows])
    spans, starts = [], [0]
    for length in lengths:
        spans += [(0, num_parent, 7, 100), (num_parent, length + 3, num_parent, 0)]
        starts.append(len(spans))
    first_slot, num_tokens, stored, delta = map(_ints, zip(*spans, strict=True))
    queries = _ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
    batch = SpanBatch(queries, table, _ints(starts), first_slot, num_tokens, stored, delta, size)
    if shape.reweighted:
        chosen = _ints([int(span in (0, 4)) for span in range(len(spans))])
        factors = torch.full((4,), 0.5)
        batch = replace(batch, reweighting=Reweighting(chosen, factors, factors))
    batch.validate()
    return batch


def _kv_cache(shape: AttentionShape) -> torch.Tensor:
    """A KV cache as of FlashAttention: keys and values of a token side by side; or latent rows."""
    if shape.value_size is not None:
        return torch.zeros(200, 1, shape.block_size, shape.head_size, dtype=shape.dtype)
    sizes = (200, shape.block_size, shape.num_kv_heads, 2 * shape.head_size)
    return torch.zeros(sizes, dtype=shape.dtype).transpose(1, 2)


def _layout(shape: AttentionShape) -> Layout:
    return Layout.SIDE_BY_SIDE if shape.value_size is None else Layout.LATENT


def _rotation(shape: AttentionShape) -> Rotation:
    rotary_dim = shape.head_size if shape.rotary_dim is None else shape.rotary_dim
    return Rotation(torch.rand(rotary_dim // 2, dtype=torch.float64), shape.is_neox)


def _ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
