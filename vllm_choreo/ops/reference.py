# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch twins of the operations: they define what the kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_choreo.ops.adapter_factors import AdapterFactors
from vllm_choreo.ops.layout import Layout, key_view, read_kv, value_view
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.sharing import SharedReads
from vllm_choreo.ops.spans import SpanBatch

_ALL = slice(None)
# Products of fewer rows sum in another order (measured with MKL).
_MIN_ADAPTER_ROWS = 16
_QUERIES_AT_ONCE = 64  # scores of so many are in memory together


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool, offset: int = 0) -> torch.Tensor:
    """Rotate ``rotary_dim`` entries of the last dim of ``x``, from ``offset`` on.

    Args:
        x: float32 ``[..., head_size]``.
        cos_sin: float32, ``[..., rotary_dim]`` broadcastable against ``x``: cosines, then sines.
        is_neox: True pairs halves, False pairs neighbours.
        offset: entries before the first that rotates.

    Returns:
        A new tensor shaped as ``x``.
    """
    end = offset + cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    before, head, rest = x[..., :offset], x[..., offset:end], x[..., end:]
    if is_neox:
        first, second = head.chunk(2, dim=-1)
    else:
        first, second = head[..., 0::2], head[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    head = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat([before, head, rest], dim=-1)


def span_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Run ``vllm_choreo.ops.span_attention``, one request after the other, in float32."""
    queries, spans = _Queries(query, kv_cache, plan, layer), plan.spans
    if plan.reads is not None:
        _shared(queries, plan.reads, output)
        return
    for r in range(spans.num_reqs):
        first, end = spans.span_start_loc[r : r + 2].tolist()
        sizes = spans.num_tokens.tolist()
        scored: dict[bool, list[Scored]] = {False: [], True: []}
        for j in range(first, end):
            read = queries.read(r, j, 0, sizes[j], j == end - 1)
            scored[queries.is_chosen(j)].append(read)
        chosen = [queries.attend(r, scored[True])] if scored[True] else []
        queries.store(r, [queries.attend(r, scored[False])], chosen, output)


def attention_received(
    query: torch.Tensor, kv_cache: torch.Tensor, plan: SpanPlan, layer: LayerAttention
) -> list[torch.Tensor]:
    """Attention that the queries of one request give to the tokens of its spans.

    Args:
        query, kv_cache, plan, layer: arguments of ``vllm_choreo.ops.span_attention``, for a batch
            of one request.

    Returns:
        Softmax weights, summed over queries and heads, float32 ``[num_tokens]`` for each span but
        the request's own. A sink takes no part.
    """
    queries, spans = _Queries(query, kv_cache, plan, layer), plan.spans
    sizes = spans.num_tokens.tolist()
    own = len(sizes) - 1
    received = torch.zeros(sum(sizes), device=query.device)
    for begin in range(0, int(spans.query_start_loc[1]), _QUERIES_AT_ONCE):
        part = slice(begin, begin + _QUERIES_AT_ONCE)
        scores = [queries.read(0, j, 0, n, j == own, part)[0] for j, n in enumerate(sizes)]
        received += torch.softmax(torch.cat(scores, dim=-1), dim=-1).sum((0, 1, 2))
    return list(received.split(sizes)[:own])


def _shared(queries: _Queries, reads: SharedReads, output: torch.Tensor) -> None:
    """Attend group by group to its pieces; then merge the partial results of every request."""
    batch = queries.plan.spans
    partials: list[list[Partial]] = [[] for _ in range(batch.num_reqs)]
    chosen: list[list[Partial]] = [[] for _ in range(batch.num_reqs)]
    for g, group in enumerate(reads.groups()):
        is_single = g < batch.num_reqs
        found = partials if g < reads.first_chosen else chosen
        for column, r in enumerate(group.members):
            scored = [queries.read(r, *p.reads[column], p.num_tokens) for p in group.pieces]
            if is_single:
                own = int(batch.span_start_loc[r + 1]) - 1
                scored.append(queries.read(r, own, 0, int(batch.num_tokens[own]), True))
            found[r].append(queries.attend(r, scored))
    for r in range(batch.num_reqs):
        queries.store(r, partials[r], chosen[r], output)


# Scores and values of `_Queries.read`.
Scored = tuple[torch.Tensor, torch.Tensor]
# Output [q_len, num_heads, value_size] of a softmax over some of the keys, and the natural
# log-sum-exp [q_len, num_heads] of their scores.
Partial = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Queries:
    """Arguments of one call, and attention of one request's queries over pieces of spans."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    plan: SpanPlan
    layer: LayerAttention

    def rows(self, r: int) -> slice:
        start, stop = self.plan.spans.query_start_loc[r : r + 2].tolist()
        return slice(start, stop)

    def is_chosen(self, j: int) -> bool:
        """Return whether a span counts by other weights."""
        given = self.plan.spans.reweighting
        return given is not None and bool(given.is_chosen[j])

    def read(
        self,
        r: int,
        j: int,
        begin: int,
        num_tokens: int,
        is_own: bool = False,
        part: slice = _ALL,
    ) -> Scored:
        """Scores ``[group, q_len, num_kv_heads, n]`` and values ``[n, num_kv_heads, value_size]``.

        Args:
            part: range of the request's queries.
        """
        batch, cos_sin, layer = self.plan.spans, self.plan.cos_sin, self.layer
        slots = _slots(batch, r, j, begin, num_tokens)
        keys, values = read_kv(self.kv_cache, slots, layer.layout, layer.value_size)
        if layer.quantized is not None:
            keys, values = layer.quantized.keys(keys), layer.quantized.values(values)
        rows = self.query[self.rows(r)]
        own = int(batch.span_start_loc[r + 1]) - 1
        last = int(batch.num_tokens[own])
        own_index = torch.arange(last - len(rows), last, device=rows.device)[part]
        q = rows[part].float()
        q_len, num_heads, head_size = q.shape
        num_kv_heads = keys.shape[1]
        delta = int(batch.position_delta[j])
        if cos_sin is not None and delta != 0:
            q = rotate(q, cos_sin[j], layer.is_neox, layer.value_size or 0)
        q = q.view(q_len, num_kv_heads, num_heads // num_kv_heads, head_size)
        scores = layer.scale * torch.einsum("qhgd,khd->gqhk", q, keys.float())
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        index = begin + torch.arange(num_tokens, device=q.device)
        position = int(batch.stored_position[own]) + own_index
        seen = int(batch.stored_position[j]) + index - delta
        distance = position[:, None] - seen[None, :]
        if layer.alibi_slopes is not None:
            slopes = layer.alibi_slopes.view(num_kv_heads, -1).t()[:, None, :, None]
            scores = scores - slopes * distance[None, :, None, :]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_own:
            hidden |= index[None, :] > own_index[:, None]
        if layer.window is not None:
            hidden |= distance >= layer.window
        if batch.reweighting is not None and self.is_chosen(j):
            scores = scores / float(batch.reweighting.temperature[r])
        return scores.masked_fill(hidden[None, :, None, :], -torch.inf), values.float()

    def attend(self, r: int, scored: Sequence[Scored]) -> Partial:
        """Attend by one softmax over all scores and values; zeros for a query that sees none."""
        rows = self.query[self.rows(r)]
        shape = (*rows.shape[:2], self.layer.value_size or rows.shape[2])
        if not scored:
            return torch.zeros(shape, device=rows.device), torch.full(
                shape[:2], -torch.inf, device=rows.device
            )
        scores = torch.cat([s for s, _ in scored], dim=-1)
        values = torch.cat([v for _, v in scored])
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.softmax(scores, dim=-1).masked_fill(lse == -torch.inf, 0.0)
        result = torch.einsum("gqhk,khd->qhgd", weights, values)
        return result.reshape(shape), lse.permute(1, 2, 0, 3).reshape(rows.shape[:2])

    def store(
        self,
        r: int,
        partials: Sequence[Partial],
        chosen: Sequence[Partial],
        output: torch.Tensor,
    ) -> None:
        """Merge by log-sum-exp, a sink among the rest, and write the outputs of a request.

        Args:
            chosen: partial results of spans that count by other weights.
        """
        found = list(partials)
        given = self.plan.spans.reweighting
        if chosen and given is not None:
            result, lse = _merged(chosen)
            seen = lse != -torch.inf
            found.append((result, torch.where(seen, lse * float(given.factor[r]), lse)))
        sums = [lse for _, lse in found]
        if self.layer.sinks is not None:
            sums.append(self.layer.sinks.expand_as(sums[0]))
        weights = torch.softmax(torch.stack(sums), dim=0)[: len(found), ..., None]
        merged = (weights * torch.stack([result for result, _ in found])).sum(0)
        output[self.rows(r)] = merged.to(output.dtype)


def _merged(partials: Sequence[Partial]) -> Partial:
    """Merge partial results into one by their log-sum-exp."""
    sums = torch.stack([lse for _, lse in partials])
    total = torch.logsumexp(sums, dim=0)
    weights = torch.softmax(sums, dim=0).masked_fill(total == -torch.inf, 0.0)
    results = torch.stack([result for result, _ in partials])
    return (weights[..., None] * results).sum(0), total


def _slots(batch: SpanBatch, r: int, j: int, begin: int, num_tokens: int) -> torch.Tensor:
    """Cache slots (block * block_size + offset) of tokens of span ``j`` of request ``r``, int64."""
    first = int(batch.first_slot[j]) + begin
    virtual = torch.arange(first, first + num_tokens, device=batch.block_table.device)
    blocks = batch.block_table[r].long()[virtual // batch.block_size]
    return blocks * batch.block_size + virtual % batch.block_size


def reposition_keys(
    kv_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    layout: Layout,
    value_size: int | None = None,
) -> None:
    """Run ``vllm_choreo.ops.reposition_keys``, with arithmetic in float32 and one rounding."""
    src, dst = src_blocks.long(), dst_blocks.long()
    keys, values = key_view(kv_cache, layout), value_view(kv_cache, layout, value_size)
    turned = rotate(keys[src].float(), cos_sin[:, None, None, :], is_neox, value_size or 0)
    copied = values[src]
    keys[dst] = turned.to(kv_cache.dtype)
    values[dst] = copied


def add_adapter(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    factors: AdapterFactors,
    scale: float,
) -> None:
    """Run ``vllm_choreo.ops.add_adapter``, with at least 16 rows in each product."""
    padding = (0, 0, 0, max(_MIN_ADAPTER_ROWS - len(rows), 0))
    given, target = pad(x[rows], padding), pad(y[rows], padding)
    shrunk = (given.float() @ factors.shrink * scale).to(y.dtype)
    for part in factors.slices:
        target[:, part.columns].addmm_(shrunk[:, part.ranks], part.expand)
    y[rows] = target[: len(rows)]
