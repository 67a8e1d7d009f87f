# SPDX-License-Identifier: Apache-2.0
"""Attention over spans in float64, from gathered keys and values: what all sides must compute.

Written apart from `vllm_choreo.ops`: it turns the keys instead of the queries, as complex numbers,
and gathers the tokens of one request after the other. Large batches are taken in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.cases import Inputs

_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class Seen:
    """What a request reads, float64.

    Attributes:
        keys: ``[num_tokens, num_kv_heads, head_size]``, rotated to where they are seen.
        values: alike.
        positions: ``[num_tokens]``, where keys are seen.
        num_own: how many of them, the last ones, are the request's own.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    num_own: int


def turn(x: torch.Tensor, angles: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate float64 ``x`` [..., head_size] by ``angles``, one for each pair of dims."""
    half = angles.numel()
    if is_neox:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(
        torch.ones_like(angles), angles
    )
    result = x.clone()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def seen_by(inputs: Inputs, r: int) -> Seen:
    """The tokens that request ``r`` attends to, its own last."""
    batch, device = inputs.batch, inputs.query.device
    size, head_size = batch.block_size, inputs.kind.heads.head_size
    begin, end = batch.span_start_loc[r : r + 2].tolist()
    frequencies = inputs.kind.rotation().inv_freq.to(device)
    keys, values, positions = [], [], []
    for j in range(begin, end):
        slot = torch.arange(int(batch.num_tokens[j])) + int(batch.first_slot[j])
        block = batch.block_table[r, slot // size].to(device, torch.int64)
        found = inputs.kv_cache[block, :, (slot % size).to(device)].double()
        delta = int(batch.position_delta[j])
        keys.append(turn(found[..., :head_size], -delta * frequencies, inputs.kind.is_neox))
        values.append(found[..., head_size:])
        first = int(batch.stored_position[j]) - delta
        positions.append(torch.arange(first, first + len(slot), device=device))
    return Seen(torch.cat(keys), torch.cat(values), torch.cat(positions), len(positions[-1]))


def attention(inputs: Inputs, chosen: Sequence[int]) -> torch.Tensor:
    """Outputs of these queries of each request.

    Returns:
        float64 ``[num_reqs, len(chosen), num_heads, head_size]``.
    """
    q_len = inputs.work.q_len
    query = inputs.query.unflatten(0, (inputs.work.num_reqs, q_len))[:, list(chosen)].double()
    return torch.stack(
        [_of_request(inputs, seen_by(inputs, r), query[r], chosen) for r in range(len(query))]
    )


def _of_request(
    inputs: Inputs, seen: Seen, query: torch.Tensor, chosen: Sequence[int]
) -> torch.Tensor:
    num_tokens, num_kv_heads, head_size = seen.keys.shape
    grouped = query.view(len(chosen), num_kv_heads, -1, head_size)
    unseen = torch.tensor([inputs.work.q_len - 1 - i for i in chosen], device=query.device)
    visible = num_tokens - unseen  # own tokens come last
    position = seen.positions[visible - 1]
    maximum = torch.full(grouped.shape[:3], -torch.inf, dtype=torch.float64, device=query.device)
    total = torch.zeros_like(maximum)
    result = torch.zeros_like(grouped)
    for begin in range(0, num_tokens, _CHUNK_TOKENS):
        part = slice(begin, begin + _CHUNK_TOKENS)
        scores = inputs.scale * torch.einsum("qhgd,khd->qhgk", grouped, seen.keys[part])
        if inputs.kind.softcap:
            scores = inputs.kind.softcap * torch.tanh(scores / inputs.kind.softcap)
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes.double().view(num_kv_heads, -1)
            distance = seen.positions[part] - position[:, None]
            scores = scores + slopes[None, :, :, None] * distance[:, None, None, :]
        index = torch.arange(begin, begin + scores.shape[-1], device=query.device)
        hidden = index >= visible[:, None]
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
        new = torch.maximum(maximum, scores.amax(-1))
        weights = torch.exp(scores - new[..., None])
        shrink = torch.exp(maximum - new)
        result = result * shrink[..., None]
        result += torch.einsum("qhgk,khd->qhgd", weights, seen.values[part])
        total = total * shrink + weights.sum(-1)
        maximum = new
    return (result / total[..., None]).flatten(1, 2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst query's: norm of the difference over the norm of what is expected.

    Args:
        found, expected: ``[..., num_heads, head_size]``.

    Returns:
        Infinity where anything that was found is not a finite number.
    """
    if not bool(found.isfinite().all()):
        return float("inf")
    difference = torch.linalg.vector_norm(found.double() - expected, dim=(-2, -1))
    return float((difference / torch.linalg.vector_norm(expected, dim=(-2, -1))).max())
