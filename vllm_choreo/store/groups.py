# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: layers of one kind, which have blocks of their own.

An encoding has a list of blocks for every group, all of the same length. That of a group with a
sliding window may have gaps, in which vLLM's null block stands::

    tokens of a message         0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12 13
    blocks of full attention    [  b5      |  b9        |  b2        |  b7  ]
    of a window of 4 tokens     [  null    |  null      |  b3        |  b8  ]

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.semantics.positions import ParentPlan, first_seen
from vllm_choreo.store.block_copies import Block

Blocks = Sequence[Sequence[Block]]  # by group; all of the same length
BlockIndices = Sequence[Sequence[int]]  # by group


@dataclass(frozen=True)
class CacheGroups:
    """The KV cache groups of a model.

    Attributes:
        block_size: tokens in a block, of every group.
        windows: sliding window of the layers of each group; None: they attend to all tokens.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def has_windows(self) -> bool:
        """True if encodings may have gaps."""
        return any(window is not None for window in self.windows)

    def seen(self, span: ParentPlan, new_offset: int) -> tuple[range, ...]:
        """Blocks of a message that hold what a call sees of a span, by group."""
        size, end = self.block_size, -(-span.stop // self.block_size)
        firsts = (first_seen(span, new_offset, window) for window in self.windows)
        return tuple(range(f // size if f < span.stop else end, end) for f in firsts)

    def num_blocks(self, num_tokens: int) -> int:
        """Number of blocks, of all groups together, while so many tokens are encoded, at most."""
        return -(-num_tokens // self.block_size) * len(self.windows)

    def num_kept_blocks(self, num_tokens: int) -> int:
        """Number of blocks, of all groups together, that a message of so many tokens keeps."""
        return self.num_blocks(num_tokens) - sum(self.kept(num_tokens))

    def kept(self, num_tokens: int) -> tuple[int, ...]:
        """First block, by group, that a message of so many tokens keeps.

        It is that of the first token which its last block sees: so a reader right behind the
        message finds all that it sees, and so does a request that encodes the last block anew.
        """
        last = max(0, num_tokens - 1) // self.block_size
        return tuple(
            0 if window is None else max(0, last - -(-(window - 1) // self.block_size))
            for window in self.windows
        )

    def held(self, num_tokens: int) -> list[range]:
        """Blocks, by group, that a message of so many tokens keeps."""
        end = -(-num_tokens // self.block_size)
        return [range(first, end) for first in self.kept(num_tokens)]

    def whole(self, num_tokens: int) -> list[range]:
        """Blocks, by group, that hold all tokens of a message."""
        return [range(-(-num_tokens // self.block_size))] * len(self.windows)

    def kept_tokens(self, num_tokens: int) -> list[int]:
        """First token, by group, that a message of so many tokens keeps."""
        return [first * self.block_size for first in self.kept(num_tokens)]

    def can_go_on(self, blocks: Blocks, num_tokens: int) -> bool:
        """Return whether the tokens behind the first `num_tokens` find all of them that they see.

        Args:
            blocks: where these lie.
            num_tokens: tokens of whole blocks.
        """
        if not num_tokens or not self.has_windows:
            return True
        end, firsts = num_tokens // self.block_size, self.kept(num_tokens + 1)
        return has_all(blocks, [range(min(first, end), end) for first in firsts])

    def read_by_run(self, span: TokenRange, num_tokens: int) -> BlockIndices:
        """Blocks, by group, in which a run of a message finds what it sees of it, and is written.

        Args:
            span: the first token that the run may see, and the end of the message's tokens up to
                the last of the run.
            num_tokens: tokens of the run.
        """
        size, (start, stop) = self.block_size, span
        firsts = (
            start if window is None else max(start, stop - num_tokens - window + 1)
            for window in self.windows
        )
        return [range(first // size, -(-stop // size)) for first in firsts]


def indices_of(blocks: Blocks) -> list[set[int]]:
    """Indices of the blocks of each group that are no gaps."""
    return [{i for i, block in enumerate(of_group) if not block.is_null} for of_group in blocks]


def has_all(blocks: Blocks, wanted: BlockIndices) -> bool:
    """Return whether there are no gaps in the wanted blocks of each group."""
    return all(
        not any(of_group[index].is_null for index in chosen)
        for of_group, chosen in zip(blocks, wanted, strict=True)
    )
