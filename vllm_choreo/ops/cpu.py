# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels in ``csrc/``, through the extension ``vllm_choreo._C``."""

from __future__ import annotations

import functools
import importlib

import torch

from vllm_choreo.ops.layout import Layout
from vllm_choreo.ops.sharing import SharedReads
from vllm_choreo.ops.spans import SpanBatch


@functools.cache
def unavailable_reason() -> str | None:
    """None if the extension loads, else why not."""
    try:
        importlib.import_module("vllm_choreo._C")
    except ImportError as error:
        return str(error)
    return None


def available_isas() -> list[str]:
    """Instruction sets that this CPU runs and the extension has kernels for, best first."""
    names: list[str] = torch.ops.vllm_choreo.available_isas()
    return names


def use_isa(name: str | None) -> None:
    """Choose the kernels for the whole process, for tests and benchmarks; None: the best."""
    torch.ops.vllm_choreo.use_isa(name or "")


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    batch: SpanBatch,
    *,
    reads: SharedReads | None,
    scale: float,
    cos_sin: torch.Tensor | None,
    is_neox: bool,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    layout: Layout,
    tiles: object = None,
) -> None:
    """See ``vllm_choreo.ops.span_attention``; makes tiles of its own."""
    _check_layout(layout)
    torch.ops.vllm_choreo.span_attention(
        query,
        kv_cache,
        output,
        batch.query_start_loc,
        batch.block_table,
        batch.span_start_loc,
        batch.first_slot,
        batch.num_tokens,
        batch.stored_position,
        batch.position_delta,
        scale,
        cos_sin,
        is_neox,
        softcap,
        alibi_slopes,
        reads and reads.member_start_loc,
        reads and reads.member_req,
        reads and reads.piece_start_loc,
        reads and reads.piece_tokens,
        reads and reads.read_start_loc,
        reads and reads.read_span,
        reads and reads.read_begin,
    )


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    layout: Layout,
) -> None:
    """See ``vllm_choreo.ops.reposition_keys``."""
    _check_layout(layout)
    torch.ops.vllm_choreo.reposition_keys(kv_cache, src_blocks, dst_blocks, cos_sin, is_neox)


def _check_layout(layout: Layout) -> None:
    if layout is not Layout.KEYS_TRANSPOSED:
        raise ValueError(
            f"impl='cpu' reads caches with {Layout.KEYS_TRANSPOSED.value}, not those with "
            f"{layout.value}: use impl='reference' or 'triton'"
        )
