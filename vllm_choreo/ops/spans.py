# SPDX-License-Identifier: Apache-2.0
"""Spans that one attention call reads for every request, and rotations between positions.

The tokens of a request lie in a *virtual sequence*: virtual index ``s`` is slot ``s % block_size``
of block ``block_table[r, s // block_size]``. A span is a run of slots of that sequence::

    virtual sequence   | parent 0   ..pad | parent 1 ..pad | own tokens (new message) |
    spans of request r   ^first_slot, num_tokens             ^last span: causal
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch


def ints(tensor: torch.Tensor) -> list[int]:
    """Entries of a one-dimensional integer tensor."""
    values: list[int] = tensor.tolist()
    return values


@dataclass(frozen=True, eq=False)
class Reweighting:
    """Spans to which requests attend by other weights (APE, arXiv 2502.05431, 3).

    Of a request with such spans, scores of their tokens are divided by its temperature, and the
    log-sum-exp of all of them together is multiplied by its factor before they are merged with the
    rest.

    Attributes:
        is_chosen: int32 ``[num_spans]``, 1 for these spans, 0 for all others; own spans are none.
        temperature, factor: float32 ``[num_reqs]``; 1 where there are none.
    """

    is_chosen: torch.Tensor
    temperature: torch.Tensor
    factor: torch.Tensor


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """Spans that a batch of requests attends to. All tensors are int32.

    Spans are flat: request ``r`` owns the spans ``span_start_loc[r]`` up to, not including,
    ``span_start_loc[r + 1]``. The last of them is the request's *own* span (the message being
    encoded); an ordinary request has no other. With ``n`` own tokens and ``q_len`` queries,
    query ``i`` sits at virtual position ``stored_position + n - q_len + i`` and attends to own
    tokens ``0 .. n - q_len + i`` and to every token of every other span of its request.

    Attributes:
        query_start_loc: ``[num_reqs + 1]``, first query token of each request.
        block_table: ``[num_reqs, max_blocks]``, block ids; unused entries may hold anything.
        span_start_loc: ``[num_reqs + 1]``, first span of each request.
        first_slot: ``[num_spans]``, virtual index of the first token (any place in a block).
        num_tokens: ``[num_spans]``, tokens in the span, at least 1.
        stored_position: ``[num_spans]``, position to which the first key is rotated in the cache.
        position_delta: ``[num_spans]``, positions by which a query is rotated further before it
            meets the keys of the span; 0 for own spans. A key ``l`` is thereby seen at virtual
            position ``stored_position + l - position_delta``.
        block_size: tokens in a KV block.
        reweighting: weights of chosen spans; None: all spans count alike.
    """

    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    span_start_loc: torch.Tensor
    first_slot: torch.Tensor
    num_tokens: torch.Tensor
    stored_position: torch.Tensor
    position_delta: torch.Tensor
    block_size: int
    reweighting: Reweighting | None = None

    @property
    def num_reqs(self) -> int:
        """Number of requests in the batch."""
        return self.query_start_loc.numel() - 1

    @property
    def num_spans(self) -> int:
        """Number of spans of all requests."""
        return self.first_slot.numel()

    def materialize_mask(self) -> torch.Tensor:
        """Dense mask, bool ``[num_query_tokens, num_kv_tokens]``, True where attended.

        Columns are the tokens of span 0, then of span 1 and so on; a block that two spans read
        has a column for each.
        """
        query_start = ints(self.query_start_loc)
        span_start = ints(self.span_start_loc)
        sizes = ints(self.num_tokens)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        mask = torch.zeros(query_start[-1], starts[-1], dtype=torch.bool)
        for r in range(self.num_reqs):
            rows = slice(query_start[r], query_start[r + 1])
            q_len = query_start[r + 1] - query_start[r]
            own = span_start[r + 1] - 1
            mask[rows, starts[span_start[r]] : starts[own]] = True
            causal = torch.ones(q_len, sizes[own], dtype=torch.bool)
            mask[rows, starts[own] : starts[own + 1]] = causal.tril(sizes[own] - q_len)
        return mask.to(self.num_tokens.device)

    def validate(self, num_blocks: int | None = None) -> None:
        """Check shapes and contents once, when the batch is made.

        Args:
            num_blocks: blocks in the cache; if given, the block ids that spans use are checked.

        Raises:
            ValueError: the batch cannot be run; the message names the request and the field.
        """
        self._validate_shapes()
        self._validate_reweighting()
        query_start = ints(self.query_start_loc)
        span_start = ints(self.span_start_loc)
        _check_cumulative("query_start_loc", query_start, min_step=0)
        _check_cumulative("span_start_loc", span_start, min_step=1)
        if span_start[-1] != self.num_spans:
            raise ValueError(
                f"span_start_loc ends at {span_start[-1]} but there are {self.num_spans} spans; "
                "its last entry must be the number of spans"
            )
        self._validate_spans()
        self._validate_own_spans()
        if num_blocks is not None:
            self._validate_blocks(num_blocks)

    def _validate_shapes(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        num_reqs, num_spans = self.num_reqs, self.num_spans
        expected = {
            "query_start_loc": (num_reqs + 1,),
            "span_start_loc": (num_reqs + 1,),
            "first_slot": (num_spans,),
            "num_tokens": (num_spans,),
            "stored_position": (num_spans,),
            "position_delta": (num_spans,),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
            if tensor.dtype != torch.int32:
                raise ValueError(f"{name} is {tensor.dtype}; make it torch.int32")
        table = self.block_table
        if table.dim() != 2 or table.shape[0] != num_reqs or table.dtype != torch.int32:
            raise ValueError(
                f"block_table is {table.dtype} {tuple(table.shape)}; expected torch.int32 "
                f"[{num_reqs}, max_blocks]"
            )

    def _validate_reweighting(self) -> None:
        given = self.reweighting
        if given is None:
            return
        shapes = {
            "is_chosen": (given.is_chosen, self.num_spans, torch.int32),
            "temperature": (given.temperature, self.num_reqs, torch.float32),
            "factor": (given.factor, self.num_reqs, torch.float32),
        }
        for name, (tensor, size, dtype) in shapes.items():
            if tuple(tensor.shape) != (size,) or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} [{size}]"
                )
        is_host = given.temperature.device.type == "cpu"
        if is_host and not bool((given.temperature > 0).all()):
            raise ValueError("a temperature must be above 0")
        own = [end - 1 for end in ints(self.span_start_loc)[1:]]
        if bool(given.is_chosen[own].any()):
            raise ValueError("own spans count as they are; choose parents alone")

    def _request_of(self, span: int) -> int:
        return int(np.searchsorted(self.span_start_loc.numpy(), span, side="right")) - 1

    def _validate_spans(self) -> None:
        first, num_tokens = self.first_slot.numpy(), self.num_tokens.numpy()
        if (j := _first_of(num_tokens < 1)) is not None:
            raise ValueError(
                f"request {self._request_of(j)}: span {j} has num_tokens {num_tokens[j]}; leave "
                "empty spans out"
            )
        last = first.astype(np.int64) + num_tokens - 1
        capacity = self.block_table.shape[1] * self.block_size
        if (j := _first_of((first < 0) | (last >= capacity))) is not None:
            raise ValueError(
                f"request {self._request_of(j)}: span {j} covers slots {first[j]}..{last[j]}, but "
                f"its row of block_table covers 0..{capacity - 1}"
            )

    def _validate_own_spans(self) -> None:
        own = self.span_start_loc.numpy()[1:] - 1
        delta, num_tokens = self.position_delta.numpy()[own], self.num_tokens.numpy()[own]
        if (r := _first_of(delta != 0)) is not None:
            raise ValueError(
                f"request {r}: position_delta of its own span {own[r]} is {delta[r]}; new tokens "
                "keep the positions they are stored at, so it must be 0"
            )
        q_len = np.diff(self.query_start_loc.numpy())
        if (r := _first_of(q_len > num_tokens)) is not None:
            raise ValueError(
                f"request {r}: {q_len[r]} query tokens but its own span {own[r]} holds only "
                f"{num_tokens[r]}; num_tokens of the own span includes this step's tokens"
            )

    def _validate_blocks(self, num_blocks: int) -> None:
        bounds = zip(ints(self.first_slot), ints(self.num_tokens), strict=True)
        for j, (first, num_tokens) in enumerate(bounds):
            r, begin = self._request_of(j), first // self.block_size
            used = self.block_table[r, begin : (first + num_tokens - 1) // self.block_size + 1]
            low, high = int(used.min()), int(used.max())
            if low < 0 or high >= num_blocks:
                raise ValueError(
                    f"request {r}: span {j} uses block ids {low}..{high}, but the cache has blocks "
                    f"0..{num_blocks - 1}"
                )


def _first_of(found: np.ndarray) -> int | None:
    """Index of the first True, None if there is none."""
    return int(found.argmax()) if found.any() else None


def _check_cumulative(name: str, values: list[int], min_step: int) -> None:
    """Refuse start locations that do not begin at 0 or grow by less than ``min_step``."""
    if not values or values[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {values[:1]}")
    for r, (start, stop) in enumerate(itertools.pairwise(values)):
        if stop - start < min_step:
            raise ValueError(
                f"{name} goes from {start} to {stop} at request {r}; it must grow by at least "
                f"{min_step}"
            )


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of a head per position, by one layer's rotary embedding.

    Attributes:
        inv_freq: float64 ``[rotary_dim / 2]``, radians per position, scaling (linear, llama3,
            YaRN) included; empty for a layer without rotary embedding. Magnitude factors such as
            YaRN's are in the stored keys already and are no part of a further rotation.
        is_neox: True pairs dim ``i`` with ``i + rotary_dim / 2``, False pairs ``2i`` with
            ``2i + 1``.
    """

    inv_freq: torch.Tensor
    is_neox: bool

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of a head that rotate; 0 without rotary embedding."""
        return 2 * self.inv_freq.numel()

    def cos_sin(self, deltas: torch.Tensor) -> torch.Tensor:
        """Cosines, then sines, of a rotation by each delta.

        Args:
            deltas: positions, integer ``[n]``, negative ones included.

        Returns:
            float32 ``[n, rotary_dim]``. Angles are taken in float64, since float32 loses
            5e-3 radians at 100,000 positions.
        """
        inv_freq = self.inv_freq.to(device=deltas.device, dtype=torch.float64)
        angles = deltas.to(torch.float64)[:, None] * inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.float32)
