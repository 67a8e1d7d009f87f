# SPDX-License-Identifier: Apache-2.0
"""C++ kernels of ``csrc/``, through the extension ``vllm_choreo._C``."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from vllm_choreo.ops.adapter_factors import AdapterFactors
from vllm_choreo.ops.layout import Layout
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.sharing import SharedReads, check_reads
from vllm_choreo.ops.spans import Reweighting, SpanBatch


@functools.cache
def unavailable_reason() -> str | None:
    """Reason for which the extension does not load, or None if it does."""
    try:
        _kernels()
    except ImportError as error:
        return str(error)
    return None


class _KernelPlan(Protocol):
    """A plan that the kernels have checked and copied."""

    def partial_bytes(self, num_heads: int, num_kv_heads: int, head_size: int) -> int: ...


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("vllm_choreo._C")


def available_isas() -> list[str]:
    """Instruction sets that this CPU runs and the extension has kernels for, best first."""
    names: list[str] = _kernels().available_isas()
    return names


def use_isa(name: str | None) -> None:
    """Choose the kernels for the whole process, for tests and benchmarks; None: the best."""
    _kernels().use_isa(name or "")


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Run ``vllm_choreo.ops.span_attention``, with tiles of its own, made once per plan."""
    made = _plans.get(plan)
    if made is None:
        made = _plans[plan] = _make_plan(plan)
    kernel_layer = _layers.get(layer)
    if kernel_layer is None:
        kernel_layer = _layers[layer] = _make_layer(layer)
    _kernels().span_attention(query, kv_cache, output, made, kernel_layer)


# What the kernels know a plan and a layer by. A plan is checked when it is first used, and copied,
# so that later calls need not look at it again.
_plans: WeakKeyDictionary[SpanPlan, _KernelPlan] = WeakKeyDictionary()
_layers: WeakKeyDictionary[LayerAttention, object] = WeakKeyDictionary()


def _make_plan(plan: SpanPlan) -> _KernelPlan:
    """Check and copy a plan for the kernels.

    Raises:
        ValueError: arrays that do not fit together, or members of a group of readers that read
            different slots.
        IndexError: a span or a read that reaches beyond what it is part of.
    """
    check_reads(plan.spans, plan.reads)
    reweighting = plan.spans.reweighting if plan.reads else None
    made: _KernelPlan = _kernels().SpanPlan(
        spans=_arrays(plan.spans),
        reads=plan.reads and _arrays(plan.reads),
        cos_sin=plan.cos_sin,
        block_size=plan.spans.block_size,
        first_chosen=plan.reads.first_chosen if plan.reads else 0,
        reweighting=reweighting and _arrays(reweighting),
    )
    return made


def _arrays(owner: SpanBatch | SharedReads | Reweighting) -> dict[str, torch.Tensor]:
    return {name: array for name, array in vars(owner).items() if isinstance(array, torch.Tensor)}


def _make_layer(layer: LayerAttention) -> object:
    _check_layout(layer.layout, layer.value_size)
    quantized = layer.quantized
    return _kernels().LayerAttention(
        scale=layer.scale,
        is_neox=layer.is_neox,
        softcap=layer.softcap,
        alibi_slopes=layer.alibi_slopes,
        window=layer.window,
        sinks=layer.sinks,
        quantized=quantized.name if quantized else "",
        key_scale=quantized.key_scale if quantized else 1.0,
        value_scale=quantized.value_scale if quantized else 1.0,
        latent_value_size=layer.value_size,
    )


def partial_bytes(plan: SpanPlan, num_heads: int, num_kv_heads: int, head_size: int) -> int:
    """Bytes of partial results that a layer of this shape takes, with torch's threads."""
    return _make_plan(plan).partial_bytes(num_heads, num_kv_heads, head_size)


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    layout: Layout,
    value_size: int | None = None,
) -> None:
    """Run ``vllm_choreo.ops.reposition_keys``."""
    _check_layout(layout, value_size)
    _kernels().reposition_keys(kv_cache, src_blocks, dst_blocks, cos_sin, is_neox, value_size)


def add_adapter(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    factors: AdapterFactors,
    scale: float,
) -> None:
    """Run ``vllm_choreo.ops.add_adapter``, with a copy of the factors made once."""
    made = _adapters.get(factors)
    if made is None:
        slices = [(part.expand, part.first_rank, part.first_column) for part in factors.slices]
        made = _adapters[factors] = _kernels().Adapter(factors.shrink, slices)
    made.add(y, x, rows, scale)


_adapters: WeakKeyDictionary[AdapterFactors, Any] = WeakKeyDictionary()


def _check_layout(layout: Layout, value_size: int | None) -> None:
    if layout not in (Layout.KEYS_TRANSPOSED, Layout.LATENT):
        raise ValueError(
            f"impl='cpu' reads caches with {Layout.KEYS_TRANSPOSED.value} or "
            f"{Layout.LATENT.value}, not those with {layout.value}: use impl='reference' or "
            "'triton'"
        )
    if (layout is Layout.LATENT) != (value_size is not None):
        raise ValueError(
            f"value_size is {value_size} and the layout {layout.value!r}: caches of "
            f"{Layout.LATENT.value!r} need one, others have none"
        )
