# SPDX-License-Identifier: Apache-2.0
"""MLA: one compressed row a token serves any position, for only `q_pe` is rotated.

A layer stores for each token `c` (a key and value of all heads, compressed, without a position) and
`k_pe` (one rotated key for all heads). Scores are `q_nope · (c W_uk) + q_pe · k_pe`. With `W_uk`
absorbed into the query and `W_uv` behind the attention, a span of a parent is read as one head of
keys `[c, k_pe]`; to see it elsewhere, `q_pe` is turned by its position delta, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from tests.prototypes.drawn import (
    TOLERANCE,
    VOCAB_SIZE,
    Call,
    Weights,
    draw_calls,
    norm,
    rotate,
)

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK = 24, 3, 8, 4, 6, 10
BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 60, 2
SCALE = 1 / math.sqrt(NOPE + ROPE)


class Layer:
    """Weights of one layer: `x [n, HIDDEN]` to what attention takes, and back."""

    def __init__(self, weights: Weights) -> None:
        self.w_q = weights.draw(HIDDEN, HEADS, NOPE + ROPE, gain=1.6)
        self.w_c, self.w_pe = weights.draw(HIDDEN, RANK), weights.draw(HIDDEN, 1, ROPE, gain=1.6)
        self.w_uk, self.w_uv = weights.draw(RANK, HEADS, NOPE), weights.draw(RANK, HEADS, VALUE)
        self.w_o, self.w_mlp = weights.draw(HEADS * VALUE, HIDDEN), weights.draw(HIDDEN, HIDDEN)

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`q_nope [n, HEADS, NOPE]` and `q_pe [n, HEADS, ROPE]`, not rotated."""
        return torch.einsum("nd,dhk->nhk", norm(x), self.w_q).split((NOPE, ROPE), dim=-1)

    def compressed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`c [n, RANK]` and `k_pe [n, 1, ROPE]`, not rotated."""
        return norm(norm(x) @ self.w_c), torch.einsum("nd,dhk->nhk", norm(x), self.w_pe)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """`attended [n, HEADS, VALUE]`: what the heads found."""
        x = x + attended.flatten(1) @ self.w_o
        return x + torch.tanh(norm(x) @ self.w_mlp)


class Model:
    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.embedding = weights.draw(VOCAB_SIZE, HIDDEN, gain=math.sqrt(VOCAB_SIZE))
        self.layers = [Layer(weights) for _ in range(NUM_LAYERS)]


# ---- the oracle: keys and values of all heads, each rotated once to where it is seen ----


class Dense:
    def __init__(self, model: Model) -> None:
        self.model = model
        # By message, by layer: `c`, and `k_pe` before any rotation.
        self.stored: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def encode(self, call: Call) -> torch.Tensor:
        """float64 `[n, HIDDEN]`: the last layer's output."""
        x = self.model.embedding[list(call.tokens)]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(self.model.layers):
            own.append(layer.compressed(x))
            read = [
                [kept[p.start : p.stop] for kept in self.stored[p.number][number]]
                for p in call.parents
            ]
            c, k_pe = (torch.cat(parts) for parts in zip(*read, own[-1], strict=True))
            seen = torch.cat([*(p.seen() for p in call.parents), call.positions()])
            x = layer.finish(x, self._attend(layer, x, call.positions(), c, k_pe, seen))
        self.stored.append(own)
        return x

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        positions: torch.Tensor,
        c: torch.Tensor,
        k_pe: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        q_nope, q_pe = layer.queries(x)
        query = torch.cat((q_nope, rotate(q_pe, positions)), -1)
        shared = rotate(k_pe, seen).expand(-1, HEADS, -1)
        keys = torch.cat((torch.einsum("lr,rhk->lhk", c, layer.w_uk), shared), -1)
        values = torch.einsum("lr,rhv->lhv", c, layer.w_uv)
        hidden = torch.ones(len(x), len(c), dtype=torch.bool).triu(len(c) - len(x) + 1)
        scores = torch.einsum("nhk,lhk->hnl", query, keys) * SCALE
        return torch.einsum(
            "hnl,lhv->nhv", scores.masked_fill(hidden, -math.inf).softmax(-1), values
        )


# ---- the prototype: paged rows, written once, read span by span ----


@dataclass(frozen=True)
class Message:
    """Where a message lies: its blocks, and the position for which its `k_pe` are rotated."""

    block_table: list[int]
    stored_position: int


class Paged:
    def __init__(self, model: Model) -> None:
        self.model = model
        shape = (NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, RANK + ROPE)
        self.rows = torch.full(shape, math.nan, dtype=torch.float64)
        self.messages: list[Message] = []
        self.num_used = 0

    def encode(self, call: Call) -> torch.Tensor:
        """As `Dense.encode`, from blocks."""
        # As an engine does that knows new tokens by their index behind all that they read.
        base = sum(p.stop - p.start for p in call.parents)
        num_blocks = -(-len(call.tokens) // BLOCK_SIZE)
        own = Message(list(range(self.num_used, self.num_used + num_blocks)), base)
        self.num_used += num_blocks
        index = torch.arange(len(call.tokens)) + base
        x = self.model.embedding[list(call.tokens)]
        for number, layer in enumerate(self.model.layers):
            c, k_pe = layer.compressed(x)
            slots = self._slots(own, 0, len(x))
            self.rows[number].flatten(0, 1)[slots] = torch.cat((c, rotate(k_pe, index)[:, 0]), -1)
            x = layer.finish(x, self._attend(number, x, index, call, own))
        self.messages.append(own)
        return x

    def _slots(self, message: Message, start: int, stop: int) -> torch.Tensor:
        token = torch.arange(start, stop)
        return (
            torch.tensor(message.block_table)[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        )

    def _attend(
        self, number: int, x: torch.Tensor, index: torch.Tensor, call: Call, own: Message
    ) -> torch.Tensor:
        layer, rows = self.model.layers[number], self.rows[number].flatten(0, 1)
        q_nope, q_pe = layer.queries(x)
        absorbed, q_pe = torch.einsum("nhk,rhk->nhr", q_nope, layer.w_uk), rotate(q_pe, index)
        found = []
        for parent in call.parents:
            message = self.messages[parent.number]
            delta = call.new_offset - own.stored_position
            delta += message.stored_position + parent.start - parent.offset
            turned = rotate(q_pe, torch.full_like(index, delta))
            slots = self._slots(message, parent.start, parent.stop)
            found.append(_read_span(absorbed, turned, rows[slots], is_own=False))
        found.append(_read_span(absorbed, q_pe, rows[self._slots(own, 0, len(x))], is_own=True))
        return torch.einsum("nhr,rhv->nhv", _merge(found), layer.w_uv)


def _read_span(
    absorbed: torch.Tensor, q_pe: torch.Tensor, rows: torch.Tensor, is_own: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one span gives: `[n, HEADS, RANK]`, and the log of its weights' sum, `[n, HEADS]`."""
    scores = torch.cat((absorbed, q_pe), -1) @ rows.T * SCALE
    if is_own:
        n = len(rows)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    return scores.softmax(-1) @ rows[:, :RANK], scores.logsumexp(-1)


def _merge(found: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    parts, sums = (torch.stack(of) for of in zip(*found, strict=True))
    return (sums.softmax(0)[..., None] * parts).sum(0)


@pytest.mark.parametrize("seed", range(6))
def test_any_choreography_equals_the_dense_form(seed: int) -> None:
    model = Model(seed)
    dense, paged = Dense(model), Paged(model)
    for call in draw_calls(seed):
        before = paged.rows[:, : paged.num_used].clone()
        expected = dense.encode(call)
        torch.testing.assert_close(paged.encode(call), expected, rtol=0, atol=TOLERANCE)
        # Several positions of one message, and not one stored number changed.
        assert torch.equal(paged.rows[:, : before.shape[1]].nan_to_num(), before.nan_to_num())


def test_a_wrong_position_shows() -> None:
    """The tolerance is far below what one position of one parent changes."""
    calls = draw_calls(0)
    number, call = next((n, call) for n, call in enumerate(calls) if call.parents)
    first, *others = call.parents
    moved = replace(call, parents=(replace(first, offset=first.offset + 1), *others))
    found = []
    for read in (call, moved):
        dense = Dense(Model(0))
        for before in calls[:number]:
            dense.encode(before)
        found.append(dense.encode(read))
    assert float((found[0] - found[1]).abs().max()) > 1e6 * TOLERANCE
