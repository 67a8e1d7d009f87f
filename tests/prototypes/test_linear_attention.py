# SPDX-License-Identifier: Apache-2.0
"""Hybrid linear attention, exact chains first: the state at a message's end is what is stored.

A layer with the gated delta rule has no key per token that could be read elsewhere, only a state
that each token changes: `S <- a S`, then `S <- S + b k (v - k S)`, read as `q S`, behind a short
convolution. So a message keeps, per such layer, the state at its end and the convolution's last
inputs; a call starts from those of its last parent, which is right if its parents are a chain: each
encoded behind exactly those before it. Layers with full attention keep keys and values as ever.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch

from tests.prototypes.drawn import TOLERANCE, VOCAB_SIZE, Weights, norm, rotate

HIDDEN, HEADS, SIZE, KERNEL = 16, 2, 6, 3
IS_LINEAR = (True, True, False, True)
CHANNELS = 3 * HEADS * SIZE


class NotAChainError(ValueError):
    """The parents are not a chain, so there is no state from which the call could start."""


class Model:
    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.embedding = weights.draw(VOCAB_SIZE, HIDDEN, gain=math.sqrt(VOCAB_SIZE))
        self.w_qkv = [weights.draw(HIDDEN, CHANNELS, gain=1.3) for _ in IS_LINEAR]
        self.w_conv = [weights.draw(KERNEL, CHANNELS) for _ in IS_LINEAR]
        self.w_gates = [weights.draw(HIDDEN, 2, HEADS) for _ in IS_LINEAR]
        self.w_o = [weights.draw(HEADS * SIZE, HIDDEN) for _ in IS_LINEAR]

    def operands(
        self, layer: int, x: torch.Tensor, tail: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v `[3, n, HEADS, SIZE]`, gates a, b `[2, n, HEADS]`, and the tail of the inputs.

        `tail [KERNEL - 1, CHANNELS]` are the convolution's inputs before the first token.
        """
        inputs = torch.cat((tail, norm(x) @ self.w_qkv[layer]))
        windows = inputs.unfold(0, KERNEL, 1)
        mixed = torch.tanh(torch.einsum("nck,kc->nc", windows, self.w_conv[layer]))
        q, k, v = mixed.unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        gates = torch.einsum("nd,dgh->gnh", norm(x), self.w_gates[layer]).sigmoid()
        return torch.stack((q, norm(k) / math.sqrt(SIZE), v)), gates, inputs[1 - KERNEL :]

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Query and key, rotated, and value of a layer with full attention."""
        qkv = (norm(x) @ self.w_qkv[layer]).unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        return [rotate(qkv[0], positions), rotate(qkv[1], positions), qkv[2]]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(len(query), len(keys), dtype=torch.bool)
        hidden = hidden.triu(len(keys) - len(query) + 1)
        scores = torch.einsum("nhk,lhk->hnl", query, keys) / math.sqrt(SIZE)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hnl,lhv->nhv", weights, values)

    def finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(attended.flatten(1) @ self.w_o[layer])


# ---- the oracle: the whole text at once, the delta rule solved as one triangular system ----


def dense_delta_rule(qkv: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`[n, HEADS, SIZE]` without any state.

    With `u_t = b_t (v_t - a_t k_t S_{t-1})` the state is a decayed sum of `k_s u_s`. Put in, that
    is a triangular system for all u.
    """
    q, k, v = qkv.transpose(1, 2)
    a, b = gates.transpose(1, 2)
    total = a.log().cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp()
    lower = (b[..., None] * decay * (k @ k.mT)).tril(-1)
    system = lower + torch.eye(lower.shape[-1], dtype=torch.float64)
    u = torch.linalg.solve_triangular(system, b[..., None] * v, upper=False, unitriangular=True)
    return ((decay * (q @ k.mT)).tril() @ u).transpose(0, 1)


def dense_text(model: Model, tokens: list[int]) -> torch.Tensor:
    """float64 `[n, HIDDEN]`: an ordinary pass over the whole text."""
    x = model.embedding[tokens]
    for layer, is_linear in enumerate(IS_LINEAR):
        if is_linear:
            nothing = torch.zeros(KERNEL - 1, CHANNELS, dtype=torch.float64)
            attended = dense_delta_rule(*model.operands(layer, x, nothing)[:2])
        else:
            attended = model.attend(*model.project(layer, x, torch.arange(len(x))))
        x = model.finish(layer, x, attended)
    return x


# ---- the prototype ----


@dataclass(frozen=True)
class State:
    """Of one linear layer behind a message: `S [HEADS, SIZE, SIZE]`, the convolution's inputs."""

    memory: torch.Tensor = field(
        default_factory=lambda: torch.zeros(HEADS, SIZE, SIZE, dtype=torch.float64)
    )
    tail: torch.Tensor = field(
        default_factory=lambda: torch.zeros(KERNEL - 1, CHANNELS, dtype=torch.float64)
    )


@dataclass(frozen=True)
class Message:
    """The chain before it, where it was encoded, and per layer a state or keys and values."""

    tokens: list[int]
    chain: tuple[int, ...]
    position: int
    kept: list[State | list[torch.Tensor]]


class Chains:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.messages: list[Message] = []

    def encode(
        self, tokens: list[int], parents: list[int], offsets: list[int], new_offset: int
    ) -> torch.Tensor:
        """float64 `[n, HIDDEN]`: the last layer's output.

        Raises:
            NotAChainError: naming the parent that was not encoded behind those before it.
        """
        self._check_chain(parents, offsets, new_offset)
        x, kept = self.model.embedding[tokens], []
        for layer, is_linear in enumerate(IS_LINEAR):
            if is_linear:
                state = self.messages[parents[-1]].kept[layer] if parents else State()
                attended, new = self._linear(layer, x, state)
            else:
                positions = torch.arange(len(x)) + new_offset
                query, *new = self.model.project(layer, x, positions)
                read = [
                    *(self._read(p, a, layer) for p, a in zip(parents, offsets, strict=True)),
                    new,
                ]
                keys, values = (torch.cat(parts) for parts in zip(*read, strict=True))
                attended = self.model.attend(query, keys, values)
            kept.append(new)
            x = self.model.finish(layer, x, attended)
        self.messages.append(Message(tokens, tuple(parents), new_offset, kept))
        return x

    def _check_chain(self, parents: list[int], offsets: list[int], new_offset: int) -> None:
        """Each parent behind the one before it, then and now; so are the new tokens."""
        end = offsets[0] if parents else new_offset
        for index, (number, offset) in enumerate(zip(parents, offsets, strict=True)):
            message = self.messages[number]
            if message.chain != tuple(parents[:index]) or offset != end:
                raise NotAChainError(f"parents[{index}]: message {number} was encoded elsewhere")
            end += len(message.tokens)
        if new_offset != end:
            raise NotAChainError(f"new_offset: {new_offset}, but the chain ends at {end}")

    def _read(self, number: int, offset: int, layer: int) -> list[torch.Tensor]:
        """A parent's keys, turned to where they are seen, and values."""
        message = self.messages[number]
        key, value = message.kept[layer]
        return [rotate(key, torch.full((len(key),), offset - message.position)), value]

    def _linear(self, layer: int, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        qkv, gates, tail = self.model.operands(layer, x, state.tail)
        memory, rows = state.memory, []
        for (q, k, v), (a, b) in zip(qkv.unbind(1), gates.unbind(1), strict=True):
            memory = delta_step(memory, k, v, a, b)
            rows.append(torch.einsum("hk,hkv->hv", q, memory))
        return torch.stack(rows), State(memory, tail)


def delta_step(
    memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """One token: forget by `a`, then put `v` in the place of what `k` finds, as far as `b`."""
    memory = a[:, None, None] * memory
    found = torch.einsum("hk,hkv->hv", k, memory)
    return memory + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - found))


def summary(qkv: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a message does to any state before it: `S -> A S + B`, `[HEADS, SIZE, SIZE]` each."""
    a_map = torch.eye(SIZE, dtype=torch.float64).expand(HEADS, -1, -1)
    b_map = torch.zeros(HEADS, SIZE, SIZE, dtype=torch.float64)
    nothing = torch.zeros(HEADS, SIZE, dtype=torch.float64)
    for (_, k, v), (a, b) in zip(qkv.unbind(1), gates.unbind(1), strict=True):
        a_map = delta_step(a_map, k, nothing, a, b)
        b_map = delta_step(b_map, k, v, a, b)
    return a_map, b_map


# ---- tests ----


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_of_chains_equals_the_whole_text(seed: int) -> None:
    """Branches begin from one stored state, which none of them changes."""
    rng, model = random.Random(seed), Model(seed)
    chains = Chains(model)
    for number in range(9):
        parents: list[int] = []
        if number and rng.random() < 0.8:
            last = rng.randrange(number)
            parents = [*chains.messages[last].chain, last]
        history = [token for parent in parents for token in chains.messages[parent].tokens]
        new = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        offsets, end = [], rng.choice((0, rng.randint(0, 30)))
        if parents and rng.random() < 0.5:
            end = chains.messages[parents[0]].position
        for parent in parents:
            offsets.append(end)
            end += len(chains.messages[parent].tokens)
        expected = dense_text(model, history + new)[len(history) :]
        found = chains.encode(new, parents, offsets, end)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_what_is_no_chain_is_refused() -> None:
    chains = Chains(Model(0))
    chains.encode([1, 2, 3], [], [], 0)
    chains.encode([4, 5], [0], [0], 3)
    chains.encode([6], [], [], 0)
    for parents, offsets, new_offset in (
        ([1], [3], 5),  # without what it was encoded behind
        ([1, 0], [0, 2], 5),  # another order
        ([0, 2], [0, 3], 4),  # encoded without the first
        ([0, 1], [0, 4], 6),  # a gap
        ([0], [0], 2),  # an overlap
        ([0, 0], [0, 3], 6),  # twice
    ):
        with pytest.raises(NotAChainError):
            chains.encode([7], parents, offsets, new_offset)
    assert len(chains.messages) == 3


@pytest.mark.parametrize("seed", range(3))
def test_summaries_compose_in_any_order(seed: int) -> None:
    """What may come after chains: messages encoded alone, read in the order of the call."""
    weights = Weights(seed)
    messages = []
    for length in (5, 1, 8):
        qkv = weights.draw(3, length, HEADS, SIZE)
        qkv[1] = norm(qkv[1]) / math.sqrt(SIZE)
        messages.append((qkv, weights.draw(2, length, HEADS).sigmoid()))
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        memory = State().memory
        for number in order:
            a_map, b_map = summary(*messages[number])
            memory = a_map @ memory + b_map
        qkv, gates = (torch.cat([messages[i][part] for i in order], 1) for part in (0, 1))
        found = torch.einsum("hk,hkv->hv", qkv[0, -1], memory)
        expected = dense_delta_rule(qkv, gates)[-1]
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
