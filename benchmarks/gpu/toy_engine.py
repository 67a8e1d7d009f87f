# SPDX-License-Identifier: Apache-2.0
"""A toy engine: sequences in a paged KV cache, what each step encodes, and what it attends to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.transformer import Attend, Model, rope_frequencies
from vllm_choreo.ops import (
    LayerAttention,
    Layout,
    Rotation,
    SpanBatch,
    SpanPlan,
    plan_shared_reads,
    span_attention,
)

BLOCK_SIZE = 16


@dataclass(eq=False)
class Tokens:
    """A message, or a request without parents.

    Attributes:
        token_ids: all that are known.
        position: of the first one.
        parents: what its tokens attend to, and where they see it.
        blocks: in which its keys and values lie.
        num_encoded: tokens whose keys and values are there.
    """

    token_ids: list[int]
    position: int = 0
    parents: list[tuple[Tokens, int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_encoded: int = 0

    def slots(self, begin: int, end: int) -> list[int]:
        """Cache slots of its tokens."""
        return [
            self.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(begin, end)
        ]


# Which sequences encode how many tokens in a step.
Step = Sequence[tuple[Tokens, int]]


class ToyEngine:
    """Runs steps on a model.

    Args:
        num_blocks: of the KV cache; the first one is left to padding.
    """

    def __init__(self, model: Model, num_blocks: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        # Each layer's cache as `span_attention` takes it.
        self.paged = [cache.unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2) for cache in model.cache]
        self.rotation = Rotation(rope_frequencies(model.shape), is_neox=True)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._next_block = 1
        # A block of a prefix, by the block before it and its tokens.
        self._prefixes: dict[tuple[int, tuple[int, ...]], int] = {}

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, sequence: Tokens, num_tokens: int) -> None:
        """Blocks for that many tokens in all."""
        missing = -(-num_tokens // BLOCK_SIZE) - len(sequence.blocks)
        first = self._next_block
        self._next_block += max(missing, 0)
        if self._next_block > self.num_blocks:
            raise RuntimeError(f"the KV cache has only {self.num_blocks} blocks")
        sequence.blocks += range(first, self._next_block)

    def take_prefix(self, sequence: Tokens) -> None:
        """Share the blocks of the longest prefix that is cached; one token is left to encode."""
        block = 0
        for tokens in _full_blocks(sequence.token_ids[:-1]):
            found = self._prefixes.get((block, tokens))
            if found is None:
                break
            block = found
            sequence.blocks.append(block)
            sequence.num_encoded += BLOCK_SIZE

    def keep_prefix(self, sequence: Tokens, num_tokens: int) -> None:
        """Let later requests share its full blocks, also those that this step fills."""
        block = 0
        for i, tokens in enumerate(_full_blocks(sequence.token_ids[:num_tokens])):
            block = self._prefixes.setdefault((block, tokens), sequence.blocks[i])

    # -- steps -------------------------------------------------------------------------------------

    def encode(self, step: Step, attend: Attend) -> torch.Tensor:
        """Encode the next tokens of sequences; logits of the last one of each."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends = []
        for sequence, count in step:
            begin, end = sequence.num_encoded, sequence.num_encoded + count
            tokens += sequence.token_ids[begin:end]
            positions += range(sequence.position + begin, sequence.position + end)
            slots += sequence.slots(begin, end)
            ends.append(len(tokens) - 1)
        logits = self.model.step(tokens, positions, slots, attend, ends)
        for sequence, count in step:
            sequence.num_encoded += count
        return logits

    def spans(self, step: Step, *, is_grouped: bool) -> SpanAttention:
        """Attention by this project's kernels: read together what is shared, or each for itself."""
        return SpanAttention(self, step, is_grouped)

    def gathered(self, step: Step) -> Attend:
        """PyTorch's attention over each request's gathered keys and values; no parents."""
        model, device = self.model, self.model.device
        head_size = model.shape.heads.head_size
        counts = [count for _, count in step]
        lengths = [sequence.num_encoded + count for sequence, count in step]
        offsets = torch.arange(BLOCK_SIZE)
        slots = [
            (torch.tensor(sequence.blocks)[:, None] * BLOCK_SIZE + offsets)
            .flatten()[:length]
            .to(device)
            for (sequence, _), length in zip(step, lengths, strict=True)
        ]
        masks = [
            None if count == 1 else causal_lower_right(count, length)
            for count, length in zip(counts, lengths, strict=True)
        ]

        def attend(layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
            parts = zip(query.split(counts), output.split(counts), slots, masks, strict=True)
            for of_query, of_output, found, mask in parts:
                cached = model.cache[layer][found]
                keys, values = cached[..., :head_size], cached[..., head_size:]
                q, k, v = (x.transpose(0, 1)[None] for x in (of_query, keys, values))
                result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                of_output.copy_(result[0].transpose(0, 1))

        return attend


class SpanAttention:
    """`span_attention` for one step, and for later ones that add a token to each sequence."""

    def __init__(self, engine: ToyEngine, step: Step, is_grouped: bool) -> None:
        from vllm_choreo.ops.triton import make_tiles

        model = engine.model
        self._engine = engine
        batch = _batch(step)
        reads = plan_shared_reads(batch) if is_grouped else None
        tiles = make_tiles(
            batch, reads, **dataclasses.asdict(model.shape.heads),
            dtype=model.dtype, device=model.device,
        )  # fmt: skip
        spans = dataclasses.replace(batch, block_table=batch.block_table.to(model.device))
        cos_sin = engine.rotation.cos_sin(batch.position_delta).to(model.device)
        self._plan = SpanPlan(spans, cos_sin, reads, tiles)
        self._layer = LayerAttention(model.shape.heads.head_size**-0.5, layout=Layout.SIDE_BY_SIDE)

    def advance(self) -> None:
        """The next step encodes one more token of every sequence."""
        tiles = self._plan.tiles
        assert tiles is not None
        grown = tiles.with_own_tokens(tiles.own_tokens + 1)
        self._plan = dataclasses.replace(self._plan, tiles=grown)

    def __call__(self, layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        cache = self._engine.paged[layer]
        span_attention(query, cache, output, self._plan, self._layer, impl="triton")


def _batch(step: Step) -> SpanBatch:
    """Each sequence's parents in whole blocks, then itself."""
    rows: list[list[int]] = []
    spans: list[tuple[int, int, int, int]] = []
    span_start = [0]
    for sequence, count in step:
        row: list[int] = []
        for parent, offset in sequence.parents:
            first = len(row) * BLOCK_SIZE
            length = len(parent.token_ids)
            spans.append((first, length, parent.position, parent.position - offset))
            row += parent.blocks[: -(-length // BLOCK_SIZE)]
        first = len(row) * BLOCK_SIZE
        spans.append((first, sequence.num_encoded + count, sequence.position, 0))
        rows.append(row + sequence.blocks)
        span_start.append(len(spans))
    width = max(map(len, rows))
    starts = list(itertools.accumulate((count for _, count in step), initial=0))
    first_slot, num_tokens, stored, delta = (_ints(list(c)) for c in zip(*spans, strict=True))
    return SpanBatch(
        _ints(starts), torch.tensor([row + [0] * (width - len(row)) for row in rows]).int(),
        _ints(span_start), first_slot, num_tokens, stored, delta, BLOCK_SIZE,
    )  # fmt: skip


def _full_blocks(token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        yield tuple(token_ids[end - BLOCK_SIZE : end])


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
