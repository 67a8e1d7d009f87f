# SPDX-License-Identifier: Apache-2.0
"""Operations with a choice of the implementation, and checks of their arguments."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Literal, get_args

import torch

from vllm_choreo.ops import cpu
from vllm_choreo.ops.adapter_factors import AdapterFactors
from vllm_choreo.ops.layout import Layout, head_sizes
from vllm_choreo.ops.plan import LayerAttention, SpanPlan

logger = logging.getLogger(__name__)

Impl = Literal["reference", "cpu", "triton", "xformers"]
_IMPLS = get_args(Impl)


@functools.cache
def default_impl(device_type: str = "cpu") -> Impl:
    """Implementation that ``impl=None`` stands for, the same for the life of a process.

    On CPU ``"cpu"`` if the C++ extension is built and loads, else ``"reference"``, which is many
    times slower: that is logged once, as a warning, with the reason. Elsewhere ``"triton"``.
    """
    if device_type != "cpu":
        return "triton"
    reason = cpu.unavailable_reason()
    if reason is None:
        return "cpu"
    logger.warning(
        "vllm_choreo._C is not available (%s): attention runs in plain PyTorch, many times "
        "slower. Build it with a C++ compiler: `pip install --no-build-isolation .`, or "
        "`python setup.py build_ext --inplace` in a checkout.",
        reason,
    )
    return "reference"


@functools.cache
def _imported(impl: Impl) -> ModuleType:
    return importlib.import_module(f"vllm_choreo.ops.{impl}")


def _load(impl: Impl) -> ModuleType:
    """Import the module of an implementation, and no other."""
    if impl not in _IMPLS:
        names = ", ".join(map(repr, _IMPLS))
        raise ValueError(f"impl is {impl!r}; choose {names} or None")
    if impl == "cpu" and (reason := cpu.unavailable_reason()) is not None:
        raise RuntimeError(f"impl='cpu' was asked for, but vllm_choreo._C is missing: {reason}")
    try:
        return _imported(impl)
    except ImportError as error:
        raise RuntimeError(f"impl={impl!r} was asked for, but does not load: {error}") from error


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
    impl: Impl | None = None,
) -> None:
    """Attend, with every query, to all spans of its request, one softmax over them jointly.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, bfloat16 or (not on CPU) float16;
            rows beyond the plan's ``query_start_loc[-1]`` are ignored.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, in a latent layout
            ``[num_blocks, num_kv_heads, block_size, head_size]``, same dtype, or uint8 where the
            layer is quantized. The own tokens are stored already.
        output: ``[num_tokens, num_heads, value_size]``, or its last two dims as one; written in
            place. Values are as long as keys where the layer does not say otherwise.
        plan: spans to read.
        layer: scoring of keys: scale, caps, window and the like.
        impl: None takes ``default_impl()`` of the query's device.

    Raises:
        ValueError: arguments that do not fit together, or that the implementation has no way for.
        RuntimeError: the implementation is not installed.
    """
    name = impl or default_impl(query.device.type)
    module = _load(name)
    if output.dim() == 2 and query.dim() == 3 and output.shape[1] % query.shape[1] == 0:
        output = output.view(len(output), query.shape[1], -1)
    if name == "triton" and module.launch_again(query, kv_cache, output, plan, layer):
        return  # a layer that looks alike was checked
    if module is not cpu:  # the extension's binding checks the same, in less time
        _check_attention(query, kv_cache, output, plan, layer)
    module.span_attention(query, kv_cache, output, plan, layer)


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool = True,
    impl: Impl | None = None,
    layout: Layout = Layout.KEYS_TRANSPOSED,
    value_size: int | None = None,
) -> None:
    """Rotate the keys of whole blocks by a delta per block, in place or into other blocks.

    Args:
        kv_cache: shape and dtype as for ``span_attention``, never quantized; changed in place.
        src_blocks: int32 ``[n]``, blocks to read.
        dst_blocks: int32 ``[n]``, blocks to write, all different. Where it equals the source
            the keys are rotated in place; elsewhere the values are copied too and the source
            stays as it is. A block must not be written by one entry and read by another.
        cos_sin: float32 ``[n, rotary_dim]``, see ``Rotation.cos_sin``.
        is_neox: pairing of dims by the rotary embedding, see ``Rotation``.
        impl: None takes ``default_impl()`` of the cache's device.
        layout: layout of ``kv_cache``.
        value_size: numbers of a value in a latent cache, see ``LayerAttention``.

    Raises:
        ValueError: arguments that do not fit together.
        RuntimeError: the implementation is not installed.
    """
    module = _load(impl or default_impl(kv_cache.device.type))
    _check_cache(kv_cache, layout)
    if not kv_cache.is_floating_point() or kv_cache.element_size() == 1:
        raise ValueError(
            f"kv_cache is {kv_cache.dtype}: keys that are quantized cannot be rotated where they "
            "lie, for they would be rounded again; rotate queries"
        )
    _check_blocks(src_blocks, dst_blocks, kv_cache.shape[0])
    head_size = head_sizes(kv_cache, layout, value_size)[0]
    _check_cos_sin(cos_sin, src_blocks.numel(), head_size - (value_size or 0))
    module.reposition_keys(kv_cache, src_blocks, dst_blocks, cos_sin, is_neox, layout, value_size)


def add_adapter(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    factors: AdapterFactors,
    scale: float,
    impl: Literal["reference", "cpu"] | None = None,
) -> None:
    """Add an adapter's products, ``x @ shrink * scale @ expand``, to the output of a layer.

    As in vLLM, products to the ranks are in float32, from there in the type of the output. A row's
    result does not depend on how many others there are, or which, to the bit (``"reference"``: as
    long as they are 16 at most): the encoding of a message must not depend on how many of its
    tokens were there already.

    Args:
        y: ``[num_rows, num_columns]``, float32 or bfloat16 on the CPU; changed in place.
        x: ``[num_rows, in_features]``, same dtype.
        rows: int64 ``[n]``, rows that use the adapter, none of them twice.
        factors: matrices of the adapter in this layer.
        scale: factor of the products.
        impl: None takes ``default_impl()``.

    Raises:
        ValueError: arguments that do not fit together.
        IndexError: a row that does not exist.
        RuntimeError: the implementation is not installed.
    """
    _load(impl or default_impl()).add_adapter(y, x, rows, factors, scale)


def _check_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Check shapes and dtypes, no contents."""
    if kv_cache.dim() == 4 and kv_cache.shape[2] != plan.spans.block_size:
        raise ValueError(
            f"kv_cache has block size {kv_cache.shape[2]}, the batch {plan.spans.block_size}"
        )
    _check_cache(kv_cache, layer.layout)
    _check_dtypes(query, kv_cache, output, layer)
    _check_rows(query, kv_cache, output, layer)
    if layer.softcap < 0:
        raise ValueError(f"softcap is {layer.softcap}; use 0 for none")
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"window is {layer.window}; use None for none")
    _check_per_head("alibi_slopes", layer.alibi_slopes, query.shape[1])
    _check_per_head("sinks", layer.sinks, query.shape[1])
    if plan.cos_sin is not None:
        most = query.shape[2] - (layer.value_size or 0)
        _check_cos_sin(plan.cos_sin, plan.spans.num_spans, most)


def _check_per_head(name: str, given: torch.Tensor | None, num_heads: int) -> None:
    if given is None:
        return
    if tuple(given.shape) != (num_heads,) or given.dtype != torch.float32:
        raise ValueError(
            f"{name} is {given.dtype} {tuple(given.shape)}; expected torch.float32 [{num_heads}]"
        )


def _check_rows(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, layer: LayerAttention
) -> None:
    """Check the shapes of query and output against each other and the cache."""
    if query.dim() != 3:
        raise ValueError(f"query has shape {tuple(query.shape)}; expected [tokens, heads, size]")
    num_heads, head_size = query.shape[1:]
    num_kv_heads = kv_cache.shape[1]
    key_size, value_size = head_sizes(kv_cache, layer.layout, layer.value_size)
    if key_size != head_size:
        wanted = head_size if layer.layout is Layout.LATENT else 2 * head_size
        raise ValueError(
            f"query has head size {head_size}, so the last dim of kv_cache must be "
            f"{wanted}, not {kv_cache.shape[3]}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if output.shape != (*query.shape[:2], value_size):
        raise ValueError(
            f"output has shape {tuple(output.shape)}, which does not match query "
            f"{tuple(query.shape)} and values of {value_size}"
        )


def _check_dtypes(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, layer: LayerAttention
) -> None:
    if layer.quantized is not None and layer.value_size is not None:
        raise ValueError(
            "a latent cache is not quantized: its rows, which are keys and values at once, would "
            "have a scale of each; leave quantized out"
        )
    of_cache = query.dtype if layer.quantized is None else torch.uint8
    if kv_cache.dtype != of_cache or output.dtype != query.dtype:
        raise ValueError(
            f"query is {query.dtype}, kv_cache {kv_cache.dtype}, output {output.dtype}; "
            "they must be the same, and a quantized cache uint8"
        )


def _check_cache(kv_cache: torch.Tensor, layout: Layout) -> None:
    if kv_cache.dim() != 4 or (kv_cache.shape[3] % 2 and layout is not Layout.LATENT):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, num_kv_heads, "
            "block_size, 2 * head_size]"
        )
    is_dense = kv_cache.stride(3) == 1 and kv_cache.stride(2) == kv_cache.shape[3]
    if layout is not Layout.SIDE_BY_SIDE and not is_dense:
        raise ValueError("kv_cache must be contiguous within each (block, head)")


def _check_cos_sin(cos_sin: torch.Tensor, rows: int, head_size: int) -> None:
    if cos_sin.dim() != 2 or cos_sin.shape[0] != rows or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}; expected torch.float32 "
            f"[{rows}, rotary_dim]"
        )
    if cos_sin.shape[1] > head_size or cos_sin.shape[1] % 2:
        raise ValueError(
            f"rotary_dim is {cos_sin.shape[1]}; it must be even and at most the head size "
            f"{head_size}"
        )


def _check_blocks(src_blocks: torch.Tensor, dst_blocks: torch.Tensor, num_blocks: int) -> None:
    for name, blocks in (("src_blocks", src_blocks), ("dst_blocks", dst_blocks)):
        if blocks.dim() != 1 or blocks.dtype != torch.int32:
            raise ValueError(f"{name} is {blocks.dtype} {tuple(blocks.shape)}; expected int32 [n]")
    if src_blocks.numel() != dst_blocks.numel():
        raise ValueError(
            f"{src_blocks.numel()} source blocks but {dst_blocks.numel()} destinations"
        )
    if src_blocks.device.type != "cpu":
        return  # reading the ids back would make the host wait for the device
    src, dst = src_blocks.tolist(), dst_blocks.tolist()
    if any(not 0 <= block < num_blocks for block in src + dst):
        raise ValueError(f"block ids must lie in 0..{num_blocks - 1}, got {src} -> {dst}")
    if len(set(dst)) != len(dst):
        raise ValueError(f"dst_blocks names a block twice: {dst}")
    moved_from = {s for s, d in zip(src, dst, strict=True) if s != d}
    if clash := moved_from & set(dst):
        raise ValueError(
            f"blocks {sorted(clash)} are read by one entry and written by another; the result "
            "would depend on the order: make two calls"
        )
