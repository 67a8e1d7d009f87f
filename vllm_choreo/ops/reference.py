# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch twins of the operations: they define what the kernels compute."""

from __future__ import annotations

import torch

from vllm_choreo.ops.layout import key_view, read_kv, value_view
from vllm_choreo.ops.spans import SpanBatch


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate the leading ``rotary_dim`` entries of the last dim of ``x``.

    Args:
        x: float32 ``[..., head_size]``.
        cos_sin: float32, ``[..., rotary_dim]`` broadcastable against ``x``: cosines, then sines.
        is_neox: True pairs halves, False pairs neighbours.

    Returns:
        A new tensor shaped as ``x``.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if is_neox:
        first, second = head.chunk(2, dim=-1)
    else:
        first, second = head[..., 0::2], head[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    head = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat([head, rest], dim=-1)


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    batch: SpanBatch,
    *,
    scale: float,
    cos_sin: torch.Tensor | None,
    is_neox: bool,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """See ``vllm_choreo.ops.span_attention``; one request after the other, in float32."""
    query_start = batch.query_start_loc.tolist()
    for r in range(batch.num_reqs):
        rows = slice(query_start[r], query_start[r + 1])
        if rows.start == rows.stop:
            continue
        scores, values = _request_scores(
            query[rows].float(), kv_cache, batch, r, scale, cos_sin, is_neox, softcap, alibi_slopes
        )
        probs = torch.softmax(scores, dim=-1)
        result = torch.einsum("gqhk,khd->qhgd", probs, values)
        output[rows] = result.reshape(output[rows].shape).to(output.dtype)


def _request_scores(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: SpanBatch,
    r: int,
    scale: float,
    cos_sin: torch.Tensor | None,
    is_neox: bool,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[group, q_len, num_kv_heads, kv_len]`` and values ``[kv_len, num_kv_heads, d]``."""
    q_len, num_heads, head_size = query.shape
    num_kv_heads = kv_cache.shape[1]
    begin, end = batch.span_start_loc[r : r + 2].tolist()
    own_tokens = int(batch.num_tokens[end - 1])
    own_index = own_tokens - q_len + torch.arange(q_len, device=query.device)
    position = int(batch.stored_position[end - 1]) + own_index
    all_scores, all_values = [], []
    for j in range(begin, end):
        keys, values = read_kv(kv_cache, _span_slots(batch, r, j))
        delta = int(batch.position_delta[j])
        turn = cos_sin is not None and delta != 0
        q = rotate(query, cos_sin[j], is_neox) if turn else query  # type: ignore[index]
        q = q.view(q_len, num_kv_heads, num_heads // num_kv_heads, head_size)
        scores = scale * torch.einsum("qhgd,khd->gqhk", q, keys.float())
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        index = torch.arange(keys.shape[0], device=query.device)
        if alibi_slopes is not None:
            seen = int(batch.stored_position[j]) + index - delta
            slopes = alibi_slopes.view(num_kv_heads, -1).t()[:, None, :, None]
            scores = scores + slopes * (seen[None, :] - position[:, None])[None, :, None, :]
        if j == end - 1:
            hidden = index[None, :] > own_index[:, None]
            scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
        all_scores.append(scores)
        all_values.append(values.float())
    return torch.cat(all_scores, dim=-1), torch.cat(all_values)


def _span_slots(batch: SpanBatch, r: int, j: int) -> torch.Tensor:
    """Cache slots (block * block_size + offset) of span ``j`` of request ``r``, int64."""
    first, size = int(batch.first_slot[j]), int(batch.num_tokens[j])
    virtual = torch.arange(first, first + size, device=batch.block_table.device)
    blocks = batch.block_table[r].long()[virtual // batch.block_size]
    return blocks * batch.block_size + virtual % batch.block_size


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    """See ``vllm_choreo.ops.reposition_keys``; arithmetic in float32, one rounding."""
    src, dst = src_blocks.long(), dst_blocks.long()
    keys = key_view(kv_cache)[src].float().transpose(-1, -2)
    turned = rotate(keys, cos_sin[:, None, None, :], is_neox).transpose(-1, -2)
    values = value_view(kv_cache)[src]
    key_view(kv_cache)[dst] = turned.to(kv_cache.dtype)
    value_view(kv_cache)[dst] = values
