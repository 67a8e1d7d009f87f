# SPDX-License-Identifier: Apache-2.0
"""Random span batches, and attention over them written a second time, densely, in float64."""

import dataclasses
import random
from dataclasses import dataclass

import torch

from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    QuantizedKV,
    Reweighting,
    Rotation,
    SharedReads,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    span_attention,
)
from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.tiles import Tiles

TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    # Half a unit in the last place of 8 significant bits, at outputs up to 4, twice.
    torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2},
    # Three bits more.
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
}
# Where the GPU's implementations run: without a GPU, Triton's kernels are interpreted.
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Case:
    """What the arguments of span_attention are made of."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: SpanBatch
    rotation: Rotation
    scale: float
    softcap: float
    alibi_slopes: torch.Tensor | None
    layout: Layout = Layout.KEYS_TRANSPOSED
    window: int | None = None
    sinks: torch.Tensor | None = None
    quantized: QuantizedKV | None = None
    value_size: int | None = None

    def plan(
        self,
        reads: SharedReads | None = None,
        tiles: Tiles | None = None,
        device: torch.device | str = "cpu",
    ) -> SpanPlan:
        batch = dataclasses.replace(self.batch, block_table=self.batch.block_table.to(device))
        if batch.reweighting is not None:
            given = batch.reweighting
            moved = {n: getattr(given, n).to(device) for n in ("temperature", "factor")}
            batch = dataclasses.replace(batch, reweighting=dataclasses.replace(given, **moved))
            reads = reads or plan_shared_reads(self.batch)
        cos_sin = self.rotation.cos_sin(self.batch.position_delta).to(device)
        return SpanPlan(batch, cos_sin, reads, tiles)

    def layer(self, device: torch.device | str = "cpu") -> LayerAttention:
        slopes, sinks = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.alibi_slopes, self.sinks)
        )
        return LayerAttention(
            self.scale, self.rotation.is_neox, self.softcap, slopes, self.window, sinks,
            self.layout, self.quantized, self.value_size,
        )  # fmt: skip


def run(case: Case, impl: str, reads: SharedReads | None = None) -> torch.Tensor:
    """The output of an implementation, where it runs, from queries in host memory."""
    device = GPU if impl in ("triton", "xformers") else torch.device("cpu")
    size = (*case.query.shape[:2], case.value_size or case.query.shape[2])
    output = torch.full(size, 7.0, dtype=case.query.dtype, device=device)
    plan, layer = case.plan(reads, device=device), case.layer(device)
    span_attention(case.query.to(device), case.kv_cache.to(device), output, plan, layer, impl)
    return output.cpu()


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_rotation(rotary_dim: int, is_neox: bool) -> Rotation:
    dims = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    return Rotation(10000.0 ** (-dims / max(rotary_dim, 1)), is_neox)


def make_cache(
    num_blocks, num_kv_heads, block_size, head_size, dtype, is_latent=False
) -> torch.Tensor:
    width = head_size if is_latent else 2 * head_size
    return torch.randn(num_blocks, num_kv_heads, block_size, width).to(dtype)


def make_batch(rng: random.Random, requests: list[tuple[int, int, list[int]]], block_size: int,
               num_blocks: int) -> SpanBatch:  # fmt: skip
    """Requests are (q_len, computed own tokens, parent lengths).

    Parents lie anywhere in the virtual sequence, in the middle of blocks, one over the other; a
    block id may occur several times in a row of the block table and in several rows.
    """
    max_blocks = 768 // block_size
    query_start, span_start = [0], [0]
    spans: list[tuple[int, int, int, int]] = []
    for q_len, computed, parents in requests:
        query_start.append(query_start[-1] + q_len)
        for size in parents:
            first = rng.randrange(max_blocks * block_size - size + 1)
            spans.append((first, size, rng.randrange(500), rng.choice([0, 1, -77, 1000])))
        size = q_len + computed
        base = rng.randrange((max_blocks * block_size - size) // block_size + 1) * block_size
        spans.append((base, size, base, 0))
        span_start.append(len(spans))
    first_slot, num_tokens, stored, delta = (ints(list(c)) for c in zip(*spans, strict=True))
    table = [[rng.randrange(num_blocks) for _ in range(max_blocks)] for _ in requests]
    batch = SpanBatch(ints(query_start), torch.tensor(table, dtype=torch.int32), ints(span_start),
                      first_slot, num_tokens, stored, delta, block_size)  # fmt: skip
    batch.validate(num_blocks)
    return batch


def _draw_reweighting(batch: SpanBatch) -> Reweighting:
    """Some parents of two requests of three."""
    is_chosen = torch.randint(2, (batch.num_spans,), dtype=torch.int32)
    is_chosen[batch.span_start_loc[1:].long() - 1] = 0
    for r in range(0, batch.num_reqs, 3):
        is_chosen[int(batch.span_start_loc[r]) : int(batch.span_start_loc[r + 1])] = 0
    return Reweighting(
        is_chosen, 0.5 + torch.rand(batch.num_reqs), 0.8 + 0.4 * torch.rand(batch.num_reqs)
    )


def number_of(byte: int, dtype: torch.dtype) -> float:
    """The number that a byte is in a format of 8 bits, by the definition of the format."""
    fraction_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = divmod(byte & 0x7F, 1 << fraction_bits)
    last = (1 << (7 - fraction_bits)) - 1
    if exponent == last and dtype == torch.float8_e5m2:
        return float("nan") if fraction else sign * float("inf")
    if exponent == last and fraction == (1 << fraction_bits) - 1:
        return float("nan")
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1.0 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias)


def in_8_bits(case: Case, quantized: QuantizedKV) -> Case:
    """The same case over a cache of bytes; what they are drawn from does not matter."""
    keys, values = (view(case.kv_cache, case.layout) for view in (key_view, value_view))
    cache = torch.zeros(case.kv_cache.shape, dtype=torch.uint8)
    for view, numbers, scale in (
        (key_view, keys, quantized.key_scale),
        (value_view, values, quantized.value_scale),
    ):
        rounded = (numbers.float() / scale).to(quantized.dtype)
        view(cache, case.layout).copy_(rounded.view(torch.uint8))
    return dataclasses.replace(case, kv_cache=cache, quantized=quantized)


def in_float32(case: Case) -> Case:
    """The same case over a float32 cache of the numbers that the bytes stand for."""
    quantized = case.quantized
    table = torch.tensor([number_of(byte, quantized.dtype) for byte in range(256)])
    cache = torch.zeros(case.kv_cache.shape)
    for view, scale in ((key_view, quantized.key_scale), (value_view, quantized.value_scale)):
        numbers = table[view(case.kv_cache, case.layout).long()] * scale
        view(cache, case.layout).copy_(numbers)
    return dataclasses.replace(case, kv_cache=cache, quantized=None)


def make_case(
    seed: int,
    requests: list[tuple[int, int, list[int]]],
    *,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    group_heads: int = 3,
    head_size: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    block_size: int = 32,
    softcap: float = 0.0,
    alibi: bool = False,
    window: int | None = None,
    sinks: bool = False,
    reweighted: bool = False,
    value_size: int | None = None,
) -> Case:
    torch.manual_seed(seed)
    num_heads = num_kv_heads * group_heads
    batch = make_batch(random.Random(seed), requests, block_size, num_blocks=40)
    if reweighted:
        batch = dataclasses.replace(batch, reweighting=_draw_reweighting(batch))
        batch.validate(40)
    num_tokens = int(batch.query_start_loc[-1])
    return Case(
        query=torch.randn(num_tokens, num_heads, head_size).to(dtype),
        kv_cache=make_cache(40, num_kv_heads, block_size, head_size, dtype, value_size is not None),
        batch=batch,
        rotation=make_rotation(head_size if rotary_dim is None else rotary_dim, is_neox),
        scale=head_size**-0.5,
        softcap=softcap,
        alibi_slopes=0.1 * torch.rand(num_heads) if alibi else None,
        window=window,
        sinks=3.0 * torch.randn(num_heads) if sinks else None,
        layout=Layout.KEYS_TRANSPOSED if value_size is None else Layout.LATENT,
        value_size=value_size,
    )


def turn(x: torch.Tensor, angles: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate float64 ``x`` [..., head_size] as complex numbers by ``angles`` [..., half]."""
    half = angles.shape[-1]
    result = x.clone()
    real, imag = (
        (slice(0, half), slice(half, 2 * half))
        if is_neox
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    unit = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x[..., real], x[..., imag]) * unit
    result[..., real], result[..., imag] = turned.real, turned.imag
    return result


def _reweighted(scores: torch.Tensor, batch: SpanBatch) -> torch.Tensor:
    """Scores [heads, queries, keys] whose one softmax has the weights that are asked for.

    Of the chosen keys, with L the log-sum-exp of their scores over the temperature, each score
    becomes `score / temperature - L + factor * L`: their sum is then `exp(factor * L)`.
    """
    given = batch.reweighting
    sizes = batch.num_tokens.long()
    chosen = given.is_chosen.bool().repeat_interleave(sizes)
    requests = (batch.query_start_loc[1:] - batch.query_start_loc[:-1]).long()
    temperature, factor = (
        column.double().repeat_interleave(requests)[None, :, None]
        for column in (given.temperature, given.factor)
    )
    hot = (scores / temperature).masked_fill(~chosen, float("-inf"))
    total = hot.logsumexp(-1, keepdim=True)
    moved = torch.where(total.isfinite(), (factor - 1) * total, 0.0)
    return torch.where(chosen, hot + moved, scores)


def dense_attention(case: Case) -> torch.Tensor:
    """One score matrix for the whole batch in float64, masked by ``materialize_mask``.

    Unlike the operation it rotates the *keys*, back by the delta, one token at a time.
    """
    batch, cache = case.batch, case.kv_cache
    head_size, num_kv_heads, block_size = case.query.shape[2], cache.shape[1], batch.block_size
    keys, values, key_positions, query_positions = [], [], [], []
    for r in range(batch.num_reqs):
        for j in range(int(batch.span_start_loc[r]), int(batch.span_start_loc[r + 1])):
            angles = -int(batch.position_delta[j]) * case.rotation.inv_freq
            for token in range(int(batch.num_tokens[j])):
                slot = int(batch.first_slot[j]) + token
                block = cache[int(batch.block_table[r, slot // block_size])].double().flatten(1)
                if case.value_size is None:
                    key = block[:, slot % block_size : head_size * block_size : block_size]
                    start = head_size * (block_size + slot % block_size)
                    keys.append(turn(key, angles, case.rotation.is_neox))
                    values.append(block[:, start : start + head_size])
                else:
                    start = head_size * (slot % block_size)
                    middle, end = start + case.value_size, start + head_size
                    turned = turn(block[:, middle:end], angles, case.rotation.is_neox)
                    keys.append(torch.cat([block[:, start:middle], turned], dim=-1))
                    values.append(block[:, start:middle])
                delta = int(batch.position_delta[j])
                key_positions.append(int(batch.stored_position[j]) + token - delta)
        q_len = int(batch.query_start_loc[r + 1] - batch.query_start_loc[r])
        own = int(batch.span_start_loc[r + 1]) - 1
        end = int(batch.stored_position[own] + batch.num_tokens[own])
        query_positions += range(end - q_len, end)
    group = case.query.shape[1] // num_kv_heads
    k = torch.stack(keys).repeat_interleave(group, dim=1)
    v = torch.stack(values).repeat_interleave(group, dim=1)
    scores = case.scale * torch.einsum("qhd,khd->hqk", case.query.double(), k)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.tensor(key_positions)[None, :] - torch.tensor(query_positions)[:, None]
    if case.alibi_slopes is not None:
        scores = scores + case.alibi_slopes.double()[:, None, None] * distance
    mask = batch.materialize_mask()
    if case.window is not None:
        mask &= distance > -case.window
    scores = scores.masked_fill(~mask, float("-inf"))
    if batch.reweighting is not None:
        scores = _reweighted(scores, batch)
    if case.sinks is not None:
        sinks = case.sinks.double()[:, None, None].expand(-1, len(query_positions), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)
