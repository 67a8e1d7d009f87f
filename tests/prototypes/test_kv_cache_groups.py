# SPDX-License-Identifier: Apache-2.0
"""Several KV cache groups: a list of blocks per group, of which the windows' may have gaps.

Layers with full attention and layers with a window are two groups, which share one memory: a block
belongs to one message and one group. A message that was trimmed keeps, for the layers with windows,
only the blocks that a reader right behind it sees. A call needs of each group the blocks that one
of its tokens sees; those that are gone are made again from the recipe, and nothing else is written.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.prototypes.drawn import (
    TOLERANCE,
    VOCAB_SIZE,
    Call,
    Parent,
    Weights,
    draw_calls,
    norm,
    rotate,
)

HIDDEN, HEADS, HEAD_SIZE, WINDOW = 16, 2, 6, 7
BLOCK_SIZE, NUM_BLOCKS = 4, 160
# The group of each layer; layers 0 and 1 lie in the same memory, and 2 and 3.
FULL, LOCAL = 0, 1
GROUPS = (FULL, LOCAL, FULL, LOCAL)


class Model:
    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.embedding = weights.draw(VOCAB_SIZE, HIDDEN, gain=math.sqrt(VOCAB_SIZE))
        self.w_qkv = [weights.draw(HIDDEN, 3, HEADS, HEAD_SIZE, gain=1.4) for _ in GROUPS]
        self.w_o = [weights.draw(HEADS * HEAD_SIZE, HIDDEN) for _ in GROUPS]

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Query and key, rotated to `positions`, and value: `[n, HEADS, HEAD_SIZE]` each."""
        query, key, value = torch.einsum("nd,dshk->snhk", norm(x), self.w_qkv[layer])
        return [rotate(query, positions), rotate(key, positions), value]

    def finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(attended.flatten(1) @ self.w_o[layer])


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """`[n, HEADS, HEAD_SIZE]`; `hidden`, bool `[n, num_keys]`, is what a query does not see."""
    scores = torch.einsum("nhk,lhk->hnl", query, keys) / math.sqrt(HEAD_SIZE)
    return torch.einsum("hnl,lhv->nhv", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


# ---- the oracle: everything is kept, the window is a mask ----


class Dense:
    def __init__(self, model: Model) -> None:
        self.model = model
        # By message: the first position, and by layer key and value.
        self.stored: list[tuple[int, list[list[torch.Tensor]]]] = []

    def encode(self, call: Call) -> torch.Tensor:
        """float64 `[n, HIDDEN]`: the last layer's output."""
        x, own = self.model.embedding[list(call.tokens)], []
        positions = call.positions()
        seen = torch.cat([*(p.seen() for p in call.parents), positions])
        causal = torch.ones(len(x), len(seen), dtype=torch.bool).triu(len(seen) - len(x) + 1)
        far = positions[:, None] - seen >= WINDOW
        for layer, group in enumerate(GROUPS):
            query, *new = self.model.project(layer, x, positions)
            own.append(new)
            read = [*(self._read(p, layer) for p in call.parents), new]
            keys, values = (torch.cat(parts) for parts in zip(*read, strict=True))
            hidden = causal | far if group == LOCAL else causal
            x = self.model.finish(layer, x, attend(query, keys, values, hidden))
        self.stored.append((call.new_offset, own))
        return x

    def _read(self, parent: Parent, layer: int) -> list[torch.Tensor]:
        position, layers = self.stored[parent.number]
        key, value = (kept[parent.start : parent.stop] for kept in layers[layer])
        delta = parent.offset - (position + parent.start)
        return [rotate(key, torch.full((len(key),), delta)), value]


# ---- the prototype ----


@dataclass(frozen=True)
class Message:
    """A recipe, and for each group the message's blocks; None where one is gone."""

    call: Call
    tables: tuple[list[int | None], list[int | None]]


class Grouped:
    def __init__(self, model: Model) -> None:
        self.model = model
        # By pair of layers that lie over one another; key, then value.
        shape = (len(GROUPS) // 2, NUM_BLOCKS, BLOCK_SIZE, 2, HEADS, HEAD_SIZE)
        self.memory = torch.full(shape, math.nan, dtype=torch.float64)
        self.free = list(range(NUM_BLOCKS))
        self.messages: list[Message] = []
        self.num_restored = 0

    def encode(self, call: Call) -> torch.Tensor:
        """As `Dense.encode`, from blocks."""
        num_blocks = -(-len(call.tokens) // BLOCK_SIZE)
        every = range(num_blocks)
        message = Message(call, ([None] * num_blocks, [None] * num_blocks))
        self.messages.append(message)
        return self._run(message, [(FULL, block) for block in every] + [(LOCAL, b) for b in every])

    def trim(self, number: int) -> None:
        """Let go of what no reader right behind the message sees in layers with windows."""
        message = self.messages[number]
        end = len(message.call.tokens)
        for block, block_id in enumerate(message.tables[LOCAL]):
            # The token behind the end sees the last WINDOW - 1 tokens.
            if block_id is not None and (block + 1) * BLOCK_SIZE <= end - (WINDOW - 1):
                message.tables[LOCAL][block] = None
                self.memory[:, block_id] = math.nan
                self.free.append(block_id)

    def _run(self, message: Message, missing: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Encode all tokens of a message; only the blocks named by group and index are written."""
        call = message.call
        for parent in call.parents:
            self._restore(parent, call)
        for group, block in missing:
            message.tables[group][block] = self.free.pop(random.randrange(len(self.free)))
        x, positions = self.model.embedding[list(call.tokens)], call.positions()
        for layer, group in enumerate(GROUPS):
            query, *new = self.model.project(layer, x, positions)
            self._write(layer, message, [b for g, b in missing if g == group], new)
            read = [*(self._read(p, layer, call) for p in call.parents), (positions, *new)]
            seen, keys, values = (torch.cat(parts) for parts in zip(*read, strict=True))
            hidden = torch.ones(len(x), len(seen), dtype=torch.bool).triu(len(seen) - len(x) + 1)
            if group == LOCAL:
                hidden |= positions[:, None] - seen >= WINDOW
            x = self.model.finish(layer, x, attend(query, keys, values, hidden))
        return x

    def _restore(self, parent: Parent, call: Call) -> None:
        """Make again what the call reads of a parent and is gone."""
        message = self.messages[parent.number]
        missing = [
            (group, block)
            for group in (FULL, LOCAL)
            for block in sorted({t // BLOCK_SIZE for t in _read_tokens(parent, group, call)})
            if message.tables[group][block] is None
        ]
        if missing:
            self.num_restored += len(missing)
            self._run(message, missing)

    def _write(
        self, layer: int, message: Message, blocks: list[int], new: list[torch.Tensor]
    ) -> None:
        for block in blocks:
            part = slice(block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, len(new[0])))
            rows = torch.stack([of[part] for of in new], dim=1)
            block_id = message.tables[GROUPS[layer]][block]
            self.memory[layer // 2, block_id, : len(rows)] = rows

    def _read(self, parent: Parent, layer: int, call: Call) -> tuple[torch.Tensor, ...]:
        """Where tokens are seen, their keys there, and values: of the tokens that are read."""
        message, group = self.messages[parent.number], GROUPS[layer]
        tokens = _read_tokens(parent, group, call)
        table = message.tables[group]
        slots = [(table[token // BLOCK_SIZE], token % BLOCK_SIZE) for token in tokens]
        rows = [self.memory[layer // 2, block_id, row] for block_id, row in slots]
        empty = torch.empty(0, 2, HEADS, HEAD_SIZE, dtype=torch.float64)
        key, value = (torch.stack(rows) if rows else empty).unbind(1)
        seen = torch.tensor(tokens, dtype=torch.long) - parent.start + parent.offset
        delta = parent.offset - (message.call.new_offset + parent.start)
        return seen, rotate(key, torch.full((len(tokens),), delta)), value


def _read_tokens(parent: Parent, group: int, call: Call) -> range:
    """The tokens of the parent that some token of the call sees: its first one sees furthest."""
    if group == FULL:
        return range(parent.start, parent.stop)
    first = parent.start + max(0, call.new_offset - WINDOW + 1 - parent.offset)
    return range(min(first, parent.stop), parent.stop)


def held(prototype: Grouped, group: int) -> int:
    """Blocks of a group that messages hold."""
    return sum(b is not None for message in prototype.messages for b in message.tables[group])


@pytest.mark.parametrize("seed", range(6))
def test_any_choreography_equals_the_dense_form(seed: int) -> None:
    """Freed blocks are filled with NaN: whoever read one, or wrote a block not his, would show."""
    random.seed(seed)
    model = Model(seed)
    dense, grouped = Dense(model), Grouped(model)
    for number, call in enumerate(draw_calls(seed, max_length=22)):
        expected = dense.encode(call)
        torch.testing.assert_close(grouped.encode(call), expected, rtol=0, atol=TOLERANCE)
        assert held(grouped, FULL) + held(grouped, LOCAL) + len(grouped.free) == NUM_BLOCKS
        for trimmed in range(number + 1):
            grouped.trim(trimmed)
    assert grouped.num_restored > 0
    # A window and the block that its beginning cuts.
    most = 1 + -(-(WINDOW - 1) // BLOCK_SIZE)
    assert held(grouped, LOCAL) <= most * len(grouped.messages) < held(grouped, FULL)


def test_a_chain_restores_nothing() -> None:
    """Each message is read right behind its end: what trimming keeps is what is needed."""
    grouped, parents, end = Grouped(Model(0)), [], 0
    for number in range(4):
        tokens = tuple(range(3 * number, 3 * number + 21))
        grouped.encode(Call(tokens, tuple(parents), end))
        grouped.trim(number)
        parents.append(Parent(number, 0, len(tokens), end))
        end += len(tokens)
    assert grouped.num_restored == 0
