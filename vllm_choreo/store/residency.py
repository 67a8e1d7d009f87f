# SPDX-License-Identifier: Apache-2.0
"""Encodings that hold blocks, and calls that need them: the one owner of both counts.

Imports neither torch nor vllm. There is one reference on every block of an encoding that holds it,
and calls that read it hold their own: a block returns to the pool when the last of them lets go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.store.block_copies import Block, BlockCopies, BlockPool
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.eviction import choose_victim, over_share
from vllm_choreo.store.groups import Blocks, CacheGroups
from vllm_choreo.store.states import States


class Residency:
    """Blocks and counts of all encodings; everybody else reads them.

    A call waits for its parents, then reads them, and may be put back to waiting::

        wait_for --> read --> leave          wait_for --> leave
                      ^  |
                      +--+ wait_again

    In groups with windows an encoding keeps what is seen right behind it (`CacheGroups.kept`), and
    more while calls wait for it, or until there is too little room if one has asked for that.

    Attributes:
        groups: the KV cache groups.
        num_idle_blocks: blocks that would be given back if every idle encoding were evicted; a
            block that two of them share counts twice.
        num_blocks_of: blocks that are held, by tenant, counted in the same way.
        block_copies: the copies that the next step begins with.
        states: states of layers without keys; None: the model has none.
    """

    def __init__(self, pool: BlockPool, groups: CacheGroups, states: States | None = None) -> None:
        self.pool = pool
        self.groups = groups
        self.num_idle_blocks = 0
        self.num_blocks_of: Counter[str] = Counter()
        self.block_copies = BlockCopies(pool)
        self.states = states
        # Encodings that hold blocks, least recently used first.
        self._holding: OrderedDict[Encoding, None] = OrderedDict()

    # -- blocks ----------------------------------------------------------------------------

    def hold(self, encoding: Encoding, blocks: Blocks, num_encoded: int, step: int) -> None:
        """Make `blocks` the place of tokens `0 … num_encoded-1`, and let go of the old ones."""
        assert encoding.plan is not None, "a message is encoded according to its plan"
        assert not encoding.num_readers, "what is read stays where it is"
        num_blocks = -(-num_encoded // self.groups.block_size)
        held = tuple(list(of_group[:num_blocks]) for of_group in blocks) if num_blocks else ()
        position = encoding.stored_position if encoding.blocks else encoding.plan.own_position
        touched = [block for of_group in held for block in of_group if not block.is_null]
        self.pool.touch(touched)
        self._drop_blocks(encoding)
        with self._changing(encoding):
            encoding.blocks, encoding.num_encoded = held, num_encoded
            encoding.num_blocks = len(touched)
        encoding.stored_position, encoding.held_in_step = position, step
        self.use(encoding)
        self._trim_unless_needed(encoding)

    def fill(self, encoding: Encoding, blocks: Blocks, step: int) -> list[tuple[int, int]]:
        """Close the gaps of a resident encoding, which may be read meanwhile, by other blocks.

        Args:
            blocks: where all its tokens were encoded again; they may have gaps as well.

        Returns:
            Group and index of each gap that was closed.
        """
        closed = [
            (group, index)
            for group, (held, new) in enumerate(zip(encoding.blocks, blocks, strict=True))
            for index, block in enumerate(held)
            if block.is_null and not new[index].is_null
        ]
        with self._changing(encoding):
            for group, index in closed:
                encoding.blocks[group][index] = blocks[group][index]
            encoding.num_blocks += len(closed)
        self.pool.touch([blocks[group][index] for group, index in closed])
        encoding.held_in_step = step
        return closed

    def trim(self, encoding: Encoding) -> bool:
        """Give back what no reader right behind an encoding sees; return whether that was any."""
        firsts = self.groups.kept(encoding.num_encoded)
        encoding.is_kept_whole = False
        groups = range(len(encoding.blocks))
        gaps = [(group, index) for group in groups for index in range(firsts[group])]
        return self.open_gaps(encoding, gaps)

    def open_gaps(self, encoding: Encoding, gaps: Sequence[tuple[int, int]]) -> bool:
        """Give blocks back, by group and index; return whether any were there."""
        freed = []
        with self._changing(encoding):
            for group, index in gaps:
                held = encoding.blocks[group]
                if not held[index].is_null:
                    freed.append(held[index])
                    held[index] = self.pool.null_block
            encoding.num_blocks -= len(freed)
        self._free(freed)
        return bool(freed)

    def _trim_unless_needed(self, encoding: Encoding) -> None:
        """Trim an encoding that nobody waits for, whose tokens are final."""
        is_needed = encoding.is_awaited or encoding.is_kept_whole or not encoding.is_known
        if self.groups.has_windows and not is_needed:
            self.trim(encoding)

    def drop(self, encoding: Encoding) -> None:
        """Give all blocks of an encoding back, and its state."""
        if self.states:
            self.states.drop(encoding)
        self._drop_blocks(encoding)
        encoding.is_kept_whole = False

    def _drop_blocks(self, encoding: Encoding) -> None:
        assert not encoding.num_readers, "what is read stays where it is"
        self._free(encoding.held_blocks)
        with self._changing(encoding):
            encoding.blocks, encoding.num_encoded, encoding.stored_position = (), 0, 0
            encoding.num_blocks = 0
        encoding.unwritten = []
        self._holding.pop(encoding, None)

    def cut(self, encoding: Encoding, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens; the state was another's."""
        if self.states:
            self.states.drop(encoding)
        if encoding.num_encoded > num_tokens:
            self._cut_blocks(encoding, num_tokens)
        self._trim_unless_needed(encoding)

    def _cut_blocks(self, encoding: Encoding, num_tokens: int) -> None:
        assert not encoding.num_readers, "what is read stays where it is"
        num_blocks = -(-num_tokens // self.groups.block_size)
        cut = [block for held in encoding.blocks for block in held[num_blocks:]]
        freed = [block for block in cut if not block.is_null]
        self._free(freed)
        with self._changing(encoding):
            encoding.num_encoded = num_tokens
            encoding.num_blocks -= len(freed)
            for held in encoding.blocks:
                del held[num_blocks:]

    def patch(self, encoding: Encoding, blocks: Blocks, position: int, step: int) -> None:
        """Make `blocks` the place of a patch whose runs are still to be written over its source.

        Args:
            position: position at which token 0 is stored.
        """
        assert encoding.patch is not None
        self.hold(encoding, blocks, encoding.num_tokens, step)
        encoding.stored_position, encoding.unwritten = position, list(encoding.patch.runs)

    def on_written(self, encoding: Encoding, run: TokenRange, step: int) -> None:
        """Note that the step being planned writes the last tokens of a run."""
        encoding.unwritten.remove(run)
        encoding.held_in_step = step

    def on_unwritten(self, encoding: Encoding, run: TokenRange) -> None:
        """Note that a run was taken out of that step again."""
        encoding.unwritten = sorted([*encoding.unwritten, run])

    def move(self, encoding: Encoding, stored_position: int) -> None:
        """Note that the keys of an encoding are rotated in place."""
        assert encoding.blocks and not encoding.num_readers, "its one reader is about to start"
        encoding.stored_position = stored_position

    def use(self, encoding: Encoding) -> None:
        """Mark an encoding as most recently used."""
        if encoding.blocks:
            self._holding[encoding] = None
            self._holding.move_to_end(encoding)

    # -- counts ----------------------------------------------------------------------------

    def wait_for(self, encodings: Iterable[Encoding]) -> None:
        """Count a call that will read the encodings."""
        for encoding in encodings:
            with self._changing(encoding):
                encoding.num_waiting += 1

    def read(self, encodings: Iterable[Encoding]) -> None:
        """Count a call as reading that waited for the encodings."""
        for encoding in encodings:
            assert encoding.num_waiting > 0
            with self._changing(encoding):
                encoding.num_waiting -= 1
                encoding.num_readers += 1
            self.use(encoding)
            self._trim_unless_needed(encoding)

    def wait_again(self, encodings: Iterable[Encoding]) -> None:
        """Count a call as waiting that lost its place; the encodings may be evicted meanwhile."""
        for encoding in encodings:
            assert encoding.num_readers > 0
            with self._changing(encoding):
                encoding.num_readers -= 1
                encoding.num_waiting += 1

    def leave(self, encodings: Iterable[Encoding], *, reading: bool) -> None:
        """Count a call no more that waited for the encodings, or read them."""
        for encoding in encodings:
            assert (encoding.num_readers if reading else encoding.num_waiting) > 0
            with self._changing(encoding):
                encoding.num_readers -= reading
                encoding.num_waiting -= not reading
            self._trim_unless_needed(encoding)

    def add_encoder(self, encoding: Encoding, request_id: str) -> None:
        """Note that a request makes or encodes an encoding."""
        assert encoding.patch or not encoding.encoders, "one request encodes at a time"
        with self._changing(encoding):
            encoding.encoders.add(request_id)

    def remove_encoder(self, encoding: Encoding, request_id: str) -> None:
        """Note that the request makes or encodes it no more."""
        with self._changing(encoding):
            encoding.encoders.discard(request_id)

    # -- choices ---------------------------------------------------------------------------

    def holding(self) -> list[Encoding]:
        """Encodings that hold blocks, least recently used first."""
        return list(self._holding)

    def victim(
        self, protected: Iterable[Collection[Encoding]], waiting_too: bool, now: float
    ) -> Encoding | None:
        """Encoding whose blocks are given up next, see `choose_victim`."""
        return choose_victim(self._holding, protected, waiting_too, now)

    def trim_one(self, needed: Collection[Encoding]) -> bool:
        """Trim the least recently used encoding of those that were kept whole for a call.

        Args:
            needed: encodings that stay as they are.

        Returns:
            Whether blocks were given back.
        """
        if not self.groups.has_windows:
            return False
        whole = [e for e in self._holding if e.is_kept_whole and not e.is_awaited]
        return any(self.trim(encoding) for encoding in whole if encoding not in needed)

    def over_share(self, max_blocks: int, now: float) -> list[Encoding]:
        """Idle encodings to evict so that no tenant's hold more than `max_blocks` blocks."""
        if max(self.num_blocks_of.values(), default=0) <= max_blocks:
            return []
        return list(over_share(self._holding, max_blocks, now))

    def check(self) -> None:
        """Count everything anew; for tests. Raises AssertionError."""
        assert all(encoding.blocks for encoding in self._holding)
        assert self.num_idle_blocks == sum(e.num_idle_blocks for e in self._holding)
        counted = Counter[str]()
        for encoding in self._holding:
            counted[encoding.message.tenant] += encoding.num_blocks
            assert min(encoding.num_readers, encoding.num_waiting) >= 0
            assert not encoding.unwritten or encoding.encoders
            assert encoding.num_blocks == len(encoding.held_blocks)
            assert len(encoding.blocks) == len(self.groups.windows)
            for held in encoding.blocks:
                assert len(held) == -(-encoding.num_encoded // self.groups.block_size)
        assert counted == +self.num_blocks_of
        if self.states:
            self.states.check()

    def _free(self, blocks: Sequence[Block]) -> None:
        # Reversed, as vLLM frees: the tail of a message is reused first.
        self.pool.free_blocks(reversed(blocks))
        self.block_copies.on_freed(blocks)

    @contextmanager
    def _changing(self, encoding: Encoding) -> Iterator[None]:
        """Keep the sums right while an encoding's blocks or counts change."""
        num_idle, num_held = encoding.num_idle_blocks, encoding.num_blocks
        wanted = encoding.wants_source
        yield
        if encoding.patch is not None:
            source = encoding.patch.source
            num_idle_blocks = source.num_idle_blocks
            change = encoding.wants_source - wanted
            source.num_wanting += change
            source.num_entering += change * encoding.patch.is_entering
            self.num_idle_blocks += source.num_idle_blocks - num_idle_blocks
        self.num_idle_blocks += encoding.num_idle_blocks - num_idle
        self.num_blocks_of[encoding.message.tenant] += encoding.num_blocks - num_held
