# SPDX-License-Identifier: Apache-2.0
"""Sets of message ids that grow along a history, each sharing most of itself with those before it.

A history of n messages, each of which read many before it, has far more ways through it than
messages, and `deny` asks of every call whether a message is in it. So a set of all ids goes with
each history: it is the union of its parents' sets, costs what the parents add, and answers at once.

    number of an id   high bits -> key of a table | middle bits -> place in a branch | low bits

    {0: (leaf, leaf, None, …), 3: (…)}      a leaf is an int whose bits are numbers; what two sets
                                            have in common is one object, and is met in one step
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

_LEAF_BITS = 9  # 512 numbers in one int
_BRANCH_BITS = 5
_WIDTH = 1 << _BRANCH_BITS
_IN_LEAF, _IN_BRANCH = (1 << _LEAF_BITS) - 1, _WIDTH - 1

_Branch = tuple[Any, ...]


class MessageName:
    """An id, and its number in this process; the same object for everybody who has the id."""

    __slots__ = ("__weakref__", "id", "number")

    def __init__(self, message_id: str, number: int) -> None:
        self.id = message_id
        self.number = number


class _Names:
    """The ids that some history holds; forgotten with the last one that does."""

    def __init__(self) -> None:
        self._names: WeakValueDictionary[str, MessageName] = WeakValueDictionary()
        self._count = 0
        # An id that two threads meet at once must not have two numbers: sets would miss it.
        self._lock = threading.Lock()

    def of(self, message_id: str) -> MessageName:
        """The name of an id, which is numbered if it has none."""
        found = self._names.get(message_id)
        if found is None:
            with self._lock:
                found = self._names.get(message_id)
                if found is None:
                    found = self._names[message_id] = MessageName(message_id, self._count)
                    self._count += 1
        return found

    def find(self, message_id: str) -> MessageName | None:
        """The name of an id that some history holds."""
        return self._names.get(message_id)


_names = _Names()
name_of = _names.of


class IdSet:
    """An immutable set of message ids."""

    __slots__ = ("_branches",)

    def __init__(self, branches: Mapping[int, _Branch]) -> None:
        self._branches = branches

    @classmethod
    def known(cls, message_ids: Iterable[str]) -> IdSet:
        """Return the set of those ids that any history holds."""
        found = map(_names.find, message_ids)
        return cls(_branches_of(name.number for name in found if name is not None))

    @classmethod
    def union(cls, sets: Iterable[IdSet], names: Iterable[MessageName] = ()) -> IdSet:
        """Union of sets, and of further ids."""
        # Of what a call reads, the latest is last, and often has all of the others.
        tables = [found._branches for found in reversed(tuple(sets)) if found._branches]
        tables.append(_branches_of(name.number for name in names))
        return cls(_merged(tables))

    def holds(self, name: MessageName) -> bool:
        """Return whether the set holds an id."""
        number = name.number
        branch = self._branches.get(number >> (_LEAF_BITS + _BRANCH_BITS))
        leaf = branch[number >> _LEAF_BITS & _IN_BRANCH] if branch is not None else None
        return leaf is not None and bool(leaf >> (number & _IN_LEAF) & 1)

    def __contains__(self, message_id: str) -> bool:
        name = _names.find(message_id)
        return name is not None and self.holds(name)

    def meets(self, other: IdSet) -> bool:
        """Return whether two sets have an id in common."""
        fewer, more = sorted((self._branches, other._branches), key=len)
        for key, branch in fewer.items():
            others = more.get(key)
            if others is not None and any(
                one is not None and two is not None and one & two
                for one, two in zip(branch, others, strict=True)
            ):
                return True
        return False

    def __bool__(self) -> bool:
        return bool(self._branches)


NO_IDS = IdSet({})


def _branches_of(numbers: Iterable[int]) -> dict[int, _Branch]:
    leaves: dict[int, int] = {}
    for number in numbers:
        leaf = number >> _LEAF_BITS
        leaves[leaf] = leaves.get(leaf, 0) | 1 << (number & _IN_LEAF)
    made: dict[int, list[int | None]] = {}
    for leaf, bits in leaves.items():
        made.setdefault(leaf >> _BRANCH_BITS, [None] * _WIDTH)[leaf & _IN_BRANCH] = bits
    return {key: tuple(branch) for key, branch in made.items()}


def _merged(tables: list[Mapping[int, _Branch]]) -> Mapping[int, _Branch]:
    if len(tables) == 1:
        return tables[0]
    found: dict[int, dict[int, _Branch]] = {}  # what is the same object counts once
    for table in tables:
        for key, branch in table.items():
            found.setdefault(key, {})[id(branch)] = branch
    return {key: _joint(list(branches.values())) for key, branches in found.items()}


def _joint(branches: list[_Branch]) -> _Branch:
    if len(branches) == 1:
        return branches[0]
    made = tuple(map(_joint_leaf, zip(*branches, strict=True)))
    # The same set stays one object, so that later unions meet it once.
    return branches[0] if made == branches[0] else made


def _joint_leaf(leaves: tuple[int | None, ...]) -> int | None:
    first = leaves[0]
    if leaves.count(first) == len(leaves):
        return first
    made = first or 0
    for leaf in leaves:
        if leaf is not None and leaf is not first:
            made |= leaf
    return first if made == first else made or None
