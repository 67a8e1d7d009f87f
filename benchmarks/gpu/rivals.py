# SPDX-License-Identifier: Apache-2.0
"""Attention of others, on a copy of each request's keys and values: in a row, in their places.

Copies are made before anything is timed: a rival pays neither for gathering nor for rotating.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu import oracle
from benchmarks.gpu.cases import Inputs

# Of xformers' Triton kernel, with a causal mask.
_MAX_SPLIT_K_QUERIES = 16

# A call that returns the outputs ``[num_reqs, q_len, num_heads, head_size]``.
Side = Callable[[], torch.Tensor]


class Unavailable(Exception):
    """A rival does not run here; the text says why."""


@dataclass(frozen=True)
class Copies:
    """What each request of a batch reads, gathered; all requests read the same number of tokens.

    Attributes:
        query: ``[num_reqs, q_len, num_heads, head_size]``.
        keys, values: ``[num_reqs, num_tokens, num_kv_heads, head_size]``.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float

    @property
    def num_parents(self) -> int:
        """Tokens that every query sees."""
        return self.keys.shape[1] - self.query.shape[1]


def gather(inputs: Inputs) -> Copies:
    """Copies in the dtype of the cache, rotated in float64."""
    dtype = inputs.kind.dtype
    keys, values = [], []
    for r in range(inputs.work.num_reqs):
        seen = oracle.seen_by(inputs, r)
        keys.append(seen.keys.to(dtype))
        values.append(seen.values.to(dtype))
    query = inputs.query.unflatten(0, (inputs.work.num_reqs, inputs.work.q_len))
    return Copies(query, torch.stack(keys), torch.stack(values), inputs.scale)


def sdpa(copies: Copies) -> Side:
    """`torch.nn.functional.scaled_dot_product_attention`, with the kernel that it chooses."""
    query, keys, values = (_heads_first(x) for x in (copies.query, copies.keys, copies.values))
    q_len, num_tokens = query.shape[2], keys.shape[2]
    mask = None if q_len == 1 else causal_lower_right(q_len, num_tokens)

    def call() -> torch.Tensor:
        found = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=copies.scale, enable_gqa=True
        )
        return found.transpose(1, 2)

    return call


def flex(copies: Copies) -> Side:
    """FlexAttention; compiled on a GPU, by plain PyTorch elsewhere.

    Raises:
        Unavailable: it does not compile.
    """
    query, keys, values = (_heads_first(x) for x in (copies.query, copies.keys, copies.values))
    mask = _flex_mask(copies)
    attend = flex_attention
    if query.device.type == "cuda":
        torch._dynamo.reset()  # every shape is compiled for itself, at any number of shapes
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call() -> torch.Tensor:
        found = attend(query, keys, values, block_mask=mask, scale=copies.scale, enable_gqa=True)
        return found.transpose(1, 2)

    try:
        call()
    except Exception as error:
        raise Unavailable(f"FlexAttention: {_first_line(error)}") from error
    return call


def _flex_mask(copies: Copies) -> object:
    """Which keys a query sees; None for all of them."""
    q_len, num_parents = copies.query.shape[1], copies.num_parents
    if q_len == 1:
        return None

    def is_seen(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> object:
        return key <= query + num_parents

    num_tokens = copies.keys.shape[1]
    return create_block_mask(is_seen, None, None, q_len, num_tokens, device=copies.keys.device)


def xformers(copies: Copies) -> Side:
    """`xformers.ops.fmha`, with the operator that it chooses.

    Where its C++ library does not load, which is built for one version of torch, there is nothing
    to choose from but its Triton kernel, which does without that library.

    Raises:
        Unavailable: it is not installed, or has no operator for this.
    """
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import triton_splitk
    except Exception as error:
        raise Unavailable(f"xformers: {_first_line(error)}") from error
    num_reqs, q_len, num_heads, head_size = copies.query.shape
    num_tokens, num_kv_heads = copies.keys.shape[1:3]
    group = num_heads // num_kv_heads
    query = copies.query.reshape(1, num_reqs * q_len, num_kv_heads, group, head_size)
    keys, values = (
        x.reshape(1, -1, num_kv_heads, 1, head_size).expand(-1, -1, -1, group, -1)
        for x in (copies.keys, copies.values)
    )
    mask = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[q_len] * num_reqs, kv_padding=num_tokens, kv_seqlen=[num_tokens] * num_reqs
    )
    mask = mask.to(copies.query.device)

    def chosen() -> torch.Tensor:
        found = fmha.memory_efficient_attention_forward(
            query, keys, values, attn_bias=mask, scale=copies.scale
        )
        return found.view(copies.query.shape)

    def split_k() -> torch.Tensor:
        inputs = fmha.Inputs(query, keys, values, attn_bias=mask, scale=copies.scale)
        found, _ = triton_splitk.FwOp.apply(inputs, needs_gradient=False)
        return found.view(copies.query.shape)

    try:
        chosen()
        return chosen
    except Exception as error:
        if q_len > _MAX_SPLIT_K_QUERIES:
            raise Unavailable(f"xformers: {_first_line(error)}") from error
    try:
        split_k()
    except Exception as error:
        raise Unavailable(f"xformers: {_first_line(error)}") from error
    return split_k


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
