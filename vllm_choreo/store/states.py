# SPDX-License-Identifier: Apache-2.0
"""States of layers that have no keys: those of running requests, and those that messages left.

A layer of Mamba2, of a gated delta rule, or of a short convolution, has one state, which every
token changes. All states of a request lie under one number of a pool of their own, outside the
blocks of keys and values: so messages need no more padding than in other models, and a state is
kept at the end of every message, whatever its length.

    start    a state is taken from the pool, and begins with what the parents left
    ...      the request's tokens change it
    hold     it is what the message leaves at its end: from now on nothing changes it
    leave    it stays as it is for others, and the request goes on with a copy

An encoding may have its keys and values and lack its state: it is read as ever, but for a call
whose own state begins with it (`state_starts.py`), for which its tokens are encoded again. Imports
neither torch nor vllm.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from vllm_choreo.store.block_copies import Block, BlockCopies, BlockPool
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.state_starts import StateOrigin, StateStarts


class StatePool(BlockPool, Protocol):
    """A pool of states: vLLM's block pool, a block of which is all layers' states after a token."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...

    def get_new_blocks(self, num_blocks: int) -> Sequence[Block]: ...


class States:
    """States of requests and of encodings, with one reference for each of their holders.

    Args:
        num_in_host: states of evicted encodings that host memory has room for.
        is_composed: whether each state comes with what its message does to any state, so that
            messages are read in any order; else chains alone are.

    Attributes:
        copies: the copies of states, to and from host memory, that the next step begins with.
        starts: the states that begin in it, after these copies.
        tier: states of evicted encodings in host memory, or None.
    """

    def __init__(self, pool: StatePool, num_in_host: int = 0, is_composed: bool = False) -> None:
        self.pool = pool
        self.is_composed = is_composed
        self.copies = BlockCopies(pool)
        self.starts = StateStarts(pool)
        self.tier = HostTier(num_in_host, self.copies, _state_of) if num_in_host else None
        self._of_request: dict[str, Block] = {}
        self._gone_on: list[str] = []  # requests that go on with another state in the next step
        # Encodings that hold a state, least recently used first; and how many hold each.
        self._holding: OrderedDict[Encoding, None] = OrderedDict()
        self._num_holders: Counter[int] = Counter()

    @property
    def num_states(self) -> int:
        """States that there are; one of the pool is nobody's."""
        return self.pool.num_gpu_blocks - 1

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    # -- of requests -----------------------------------------------------------------------

    def find(self, request_id: str) -> Block | None:
        """State of a request; None: it does not run."""
        return self._of_request.get(request_id)

    def start(self, request_id: str, origin: StateOrigin | Block | None) -> None:
        """Give a request one of the free states.

        Args:
            origin: encodings that it begins with, with their states; or a state that is held,
                which another request has left; None: it begins a text, and is no call.
        """
        assert request_id not in self._of_request and self.copies.is_planning
        encodings = origin.encodings if isinstance(origin, StateOrigin) else ()
        # vLLM begins a text by itself; what its tokens do to any state begins with nothing done.
        is_empty = isinstance(origin, StateOrigin) and not encodings and not self.is_composed
        self._of_request[request_id] = self._begun(None if is_empty else origin)
        for encoding in encodings:
            self.use(encoding)

    def leave(self, request_id: str) -> Block:
        """Leave the state of a request as the step before left it; it goes on with a copy.

        There is a free one. Return what it leaves, which is held until the next step is planned.
        """
        assert self.copies.is_planning
        left = self._of_request[request_id]
        self._of_request[request_id] = self._begun(left)
        self._gone_on.append(request_id)
        self._free(left)
        return left

    def take_gone_on(self) -> list[str]:
        """End the planning of a step; return the requests that go on with another state."""
        gone_on, self._gone_on = self._gone_on, []
        return gone_on

    def adopt(self, request_id: str, state: Block) -> None:
        """Let a request start in a state that another one has left, and that is held, for good."""
        assert request_id not in self._of_request and self.copies.is_planning
        self._of_request[request_id] = state

    def _begun(self, origin: StateOrigin | Block | None) -> Block:
        (state,) = self.pool.get_new_blocks(1)
        if origin is not None:
            self.starts.add(state, origin)
        return state

    def pass_on(self, request_id: str, heir: str) -> None:
        """Let a request go on with the state of one that ends."""
        self._of_request[heir] = self._of_request.pop(request_id)

    def release(self, request_id: str) -> None:
        """Take the state of a request that ends, or starts again later."""
        if (state := self._of_request.pop(request_id, None)) is not None:
            self._free(state)

    # -- of encodings ----------------------------------------------------------------------

    def hold(self, encoding: Encoding, request_id: str, step: int) -> None:
        """Make the state of a request, which has run all tokens, what their encoding leaves.

        Args:
            step: the step that is being planned, or was planned last.
        """
        self.share(encoding, self._of_request[request_id], step)

    def share(self, encoding: Encoding, state: Block, step: int) -> None:
        """Make a state what an encoding leaves, written in `step` at the latest."""
        self.pool.touch([state])
        self.drop(encoding)
        encoding.state, encoding.state_step = state, step
        self._holding[encoding] = None
        self._num_holders[state.block_id] += 1

    def drop(self, encoding: Encoding) -> None:
        """Give the state of an encoding back, if it has one."""
        if encoding.state is not None:
            state, encoding.state = encoding.state, None
            del self._holding[encoding]
            self._num_holders[state.block_id] -= 1
            self._free(state)

    def evict(self, encoding: Encoding, step: int) -> None:
        """Give the state of an encoding back; a copy stays in host memory, if there is room.

        Args:
            step: the step that is being planned, or was planned last.
        """
        # What that step writes, or brings back, cannot be copied before it.
        is_written = not self.copies.is_planning or encoding.state_step < step
        if self.tier and encoding.state is not None and is_written:
            self.tier.save(encoding)
        self.drop(encoding)

    def restore(self, encoding: Encoding, step: int) -> None:
        """Bring the state of an encoding back from host memory, before the step being planned."""
        assert self.tier is not None
        states = self.pool.get_new_blocks(1)
        self.share(encoding, states[0], step - 1)  # calls may begin with it in the very step
        self.pool.free_blocks(states)  # the encoding holds its own reference
        self.tier.load(encoding, [(0, 0)], states)

    def let_go(self, state: Block) -> None:
        """Give back a reference on a state that was taken from the pool."""
        self._free(state)

    def use(self, encoding: Encoding) -> None:
        """Mark the state of an encoding as most recently used."""
        if encoding in self._holding:
            self._holding.move_to_end(encoding)

    def holding(self) -> list[Encoding]:
        """Encodings that hold a state, least recently used first."""
        return list(self._holding)

    def victim(self, needed: Collection[Encoding], now: float) -> Encoding | None:
        """Encoding whose state is given up next, pinned ones last, or None if none may be.

        Room is made when all encodings that share a state have given it up.

        Args:
            needed: encodings behind which calls are about to begin.
            now: the time, on the clock of the store.
        """
        pinned = None
        for encoding in self._holding:
            state = encoding.state
            assert state is not None
            # One that a request holds, or that is copied before the step, would make no room.
            if encoding in needed or state.ref_cnt > self._num_holders[state.block_id]:
                continue
            if not encoding.is_pinned(now):
                return encoding
            pinned = pinned or encoding
        return pinned

    def num_idle(self, needed: Collection[Encoding]) -> int:
        """Number of states that would be free if all encodings but `needed` gave theirs up."""
        kept = {e.state.block_id for e in needed if e.state is not None}
        held = {e.state.block_id: e.state for e in self._holding if e.state is not None}
        return sum(
            number not in kept and state.ref_cnt == self._num_holders[number]
            for number, state in held.items()
        )

    def check(self) -> None:
        """Count everything anew; for tests. Raises AssertionError."""
        assert all(encoding.state is not None for encoding in self._holding)
        held = [encoding.state for encoding in self._holding if encoding.state is not None]
        assert Counter(state.block_id for state in held) == +self._num_holders
        assert all(state.ref_cnt > 0 for state in (*held, *self._of_request.values()))

    def _free(self, state: Block) -> None:
        self.pool.free_blocks([state])
        self.copies.on_freed([state, *self.starts.on_freed([state])])


def _state_of(encoding: Encoding) -> list[list[Block]]:
    return [[encoding.state] if encoding.state is not None else []]
