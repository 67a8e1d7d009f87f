# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over a paged cache in plain PyTorch, for machines without it."""

from __future__ import annotations

from itertools import pairwise

import torch


def flash_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as vLLM's `flash_attn_varlen_func` does, by its definition, in float32.

    Args:
        q: ``[num_queries, num_heads, head_size]``.
        k, v: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        out: like `q`, written.

    Returns:
        `out`, and log-sum-exps, float32 ``[num_heads, num_queries]``.
    """
    assert return_softmax_lse
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
    group = q.shape[1] // k.shape[2]
    bounds = pairwise(cu_seqlens_q.tolist())
    for (begin, end), num_keys, blocks in zip(bounds, seqused_k.tolist(), block_table, strict=True):
        assert end - begin <= max_seqlen_q and num_keys <= max_seqlen_k
        used = blocks[: -(-num_keys // k.shape[1])].long()
        keys, values = (x[used].flatten(0, 1)[:num_keys].float() for x in (k, v))
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        scores = q[begin:end].float().transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:  # the last query sees the last key
            seen = torch.ones(end - begin, num_keys, dtype=torch.bool, device=q.device)
            scores.masked_fill_(~seen.tril(num_keys - (end - begin)), float("-inf"))
        lse[:, begin:end] = scores.logsumexp(-1)
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    return out, lse
