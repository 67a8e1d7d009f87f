# SPDX-License-Identifier: Apache-2.0
"""States with which requests begin: behind a chain, and composed of messages in any order.

A message does to a state one linear thing, and what it does is kept beside the state behind it. So
a request begins behind the first parents as far as the last of them was encoded behind exactly
those, and what the others do to a state is then done to it, in the order of the list::

    parents    A   B   C   D        behind B, whose own parents were A alone: its state as it is;
               '---'   |   |        then what C does, and what D does, wherever they were encoded
              behind  composed

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm_choreo.memory_changes import StateStart
from vllm_choreo.store.block_copies import Block, BlockPool
from vllm_choreo.store.encoding import Encoding


class StateOrigin(NamedTuple):
    """Encodings with whose states the state of a call begins.

    Attributes:
        behind: the encoding whose state it is at first; None: it is that of an empty text.
        composed: encodings that change it then, one after the other.
    """

    behind: Encoding | None
    composed: tuple[Encoding, ...] = ()

    @classmethod
    def of(cls, parents: tuple[Encoding, ...]) -> StateOrigin:
        """Find the origin of the state of a call that reads whole encodings in this order."""
        for number in range(len(parents), 0, -1):
            last = parents[number - 1]
            # Behind these, in whatever order, its state is what they compose, and then itself.
            if len(last.parents) == number - 1 and last.parents == parents[: number - 1]:
                return cls(last, parents[number:])
        return cls(None, parents)

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """All encodings whose states it takes."""
        return self.composed if self.behind is None else (self.behind, *self.composed)


class _Start(NamedTuple):
    behind: Block | None
    composed: tuple[tuple[Block, int], ...] = ()

    @classmethod
    def of(cls, origin: StateOrigin) -> _Start:
        """Find the states of encodings, which have theirs."""
        behind = _state_of(origin.behind) if origin.behind is not None else None
        return cls(behind, tuple((_state_of(e), e.num_tokens) for e in origin.composed))

    @property
    def sources(self) -> list[Block]:
        composed = [state for state, _ in self.composed]
        return composed if self.behind is None else [self.behind, *composed]


class StateStarts:
    """Queued starts of states, and the references on their sources until the step is planned."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._starts: dict[int, _Start] = {}  # by target

    @property
    def sources(self) -> list[Block]:
        """States that are held, once for each start that takes them."""
        return [state for start in self._starts.values() for state in start.sources]

    def add(self, target: Block, origin: StateOrigin | Block) -> None:
        """Queue the start of a state, which is held.

        Args:
            origin: encodings that have their states, or a state of which it is a copy.
        """
        assert target.ref_cnt and target.block_id not in self._starts
        start = _Start.of(origin) if isinstance(origin, StateOrigin) else _Start(origin)
        self._starts[target.block_id] = start
        self._pool.touch(start.sources)

    def on_freed(self, states: Iterable[Block]) -> list[Block]:
        """Withdraw the starts of states that nobody holds any more; return what they let go of."""
        released: list[Block] = []
        for state in states:
            if not state.ref_cnt and (start := self._starts.pop(state.block_id, None)):
                self._pool.free_blocks(start.sources)
                released += start.sources
        return released

    def take(self) -> tuple[StateStart, ...]:
        """End the planning of a step; return its starts, which hold no state any more."""
        planned = tuple(
            StateStart(
                target,
                start.behind.block_id if start.behind is not None else None,
                tuple((state.block_id, num_tokens) for state, num_tokens in start.composed),
            )
            for target, start in self._starts.items()
        )
        self._pool.free_blocks(self.sources)
        self._starts = {}
        return planned


def _state_of(encoding: Encoding) -> Block:
    assert encoding.state is not None, "who begins with a state has waited for it"
    return encoding.state
