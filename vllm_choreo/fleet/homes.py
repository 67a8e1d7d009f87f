# SPDX-License-Identifier: Apache-2.0
"""Homes of encodings: which engines have which, as far as their memory goes.

It is what a fleet's front knows of memories that are elsewhere, and follows the rules of their own
stores: least recently used first, pinned ones last. Above them it has the rules of a fleet: a copy
goes before an encoding that has no other home, and a tenant's share and pins count over all engines
together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import NamedTuple

from vllm_choreo.errors import LimitError
from vllm_choreo.fleet.placement import Read

# So many of those that were not used for longest are looked at for one with another home.
_LOOKED_AT = 8

_NOWHERE: frozenset[int] = frozenset()


class Dropped(NamedTuple):
    """An encoding that an engine has given up."""

    key: Hashable
    engine: int


class _Encoding:
    """An encoding and its homes: to look one up, and in the order in which it came to them."""

    __slots__ = ("homes", "is_pinned", "num_tokens", "order", "read", "tenant")

    def __init__(self, key: Hashable, num_tokens: int, tenant: str) -> None:
        self.num_tokens = num_tokens
        self.tenant = tenant
        self.is_pinned = False
        self.homes: set[int] = set()
        self.order: list[int] = []
        self.read = Read(key, num_tokens, self.homes, self.order)


class Homes:
    """Index of what lies where.

    Args:
        capacities: tokens that each engine has room for.
        tenant_share: part of all room together that one tenant's encodings may hold.
        pinned_share: part of all room together that pinned encodings may hold, in one home each.
    """

    def __init__(
        self, capacities: Sequence[int], *, tenant_share: float = 1.0, pinned_share: float = 0.5
    ) -> None:
        self._room = list(capacities)
        self._used = [0] * len(self._room)
        self._lru: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in self._room]
        self._encodings: dict[Hashable, _Encoding] = {}
        self._tenant_share = tenant_share
        self._pinned_share = pinned_share
        self._num_pinned = 0
        self._tenants: dict[str, OrderedDict[tuple[Hashable, int], None]] = {}
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._encodings)

    def of(self, key: Hashable) -> Set[int]:
        """Engines where an encoding lies."""
        encoding = self._encodings.get(key)
        return encoding.homes if encoding is not None else _NOWHERE

    def read(self, key: Hashable, num_tokens: float) -> Read:
        """An encoding as a call reads it.

        Args:
            num_tokens: tokens that it has, if it lies nowhere.
        """
        encoding = self._encodings.get(key)
        return encoding.read if encoding is not None else Read(key, num_tokens, _NOWHERE)

    def capacity(self, engine: int) -> int:
        """Tokens that an engine has room for."""
        return self._room[engine]

    def used(self, engine: int) -> int:
        """Tokens that lie on an engine."""
        return self._used[engine]

    def count(self, engine: int) -> int:
        """Encodings that lie on an engine."""
        return len(self._lru[engine])

    def add(self, key: Hashable, engine: int, num_tokens: int, tenant: str = "") -> list[Dropped]:
        """Enter an encoding's home, or that it was used there; returns what had to go for it."""
        encoding = self._encodings.get(key)
        if encoding is None:
            encoding = self._encodings[key] = _Encoding(key, num_tokens, tenant)
        if engine in encoding.homes:
            self._touch(key, engine, encoding.tenant)
            return []
        encoding.homes.add(engine)
        encoding.order.append(engine)
        self._lru[engine][key] = None
        self._used[engine] += encoding.num_tokens
        if self._tenant_share < 1:
            self._tenants.setdefault(encoding.tenant, OrderedDict())[key, engine] = None
            held = self._held.get(encoding.tenant, 0)
            self._held[encoding.tenant] = held + encoding.num_tokens
        return self._make_room(key, engine, encoding.tenant)

    def remove(self, key: Hashable) -> None:
        """Forget an encoding, in all its homes."""
        encoding = self._encodings.get(key)
        for engine in list(encoding.order) if encoding is not None else ():
            self._leave(key, engine)

    def leave(self, key: Hashable, engine: int) -> None:
        """Forget an encoding in one home, if it lies there."""
        encoding = self._encodings.get(key)
        if encoding is not None and engine in encoding.homes:
            self._leave(key, engine)

    def remove_engine(self, engine: int) -> list[Hashable]:
        """Forget all that lay on an engine that has ended; returns what lies nowhere now."""
        lost = list(self._lru[engine])
        for key in lost:
            self._leave(key, engine)
        return [key for key in lost if key not in self._encodings]

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Keep encodings in one home at least, as long as their engines live.

        Raises:
            LimitError: pinned ones would hold too much of the fleet; nothing was pinned.
        """
        found = [e for key in dict.fromkeys(keys) if (e := self._encodings.get(key)) is not None]
        new = [encoding for encoding in found if not encoding.is_pinned]
        num_pinned = self._num_pinned + sum(encoding.num_tokens for encoding in new)
        limit = int(self._pinned_share * sum(self._room))
        if num_pinned > limit:
            raise LimitError(
                f"pinned messages may hold {limit} tokens of the engines together (pinned_share): "
                "take other pins back, or pin less",
                parameter="messages",
                value=f"{num_pinned} tokens",
            )
        self._num_pinned = num_pinned
        for encoding in new:
            encoding.is_pinned = True

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Take pins back."""
        for key in keys:
            encoding = self._encodings.get(key)
            if encoding is not None and encoding.is_pinned:
                encoding.is_pinned = False
                self._num_pinned -= encoding.num_tokens

    # -- room ------------------------------------------------------------------------------------

    def _make_room(self, new: Hashable, engine: int, tenant: str) -> list[Dropped]:
        """Drop what there is no room for, and what is beyond the tenant's share; never `new`."""
        dropped = []
        if self._tenant_share < 1:
            share = self._tenant_share * sum(self._room)
            while self._held[tenant] > share:
                found = next((at for at in self._tenants[tenant] if self._may_go(*at, new)), None)
                if found is None:
                    break
                dropped.append(Dropped(*found))
                self._leave(*found)
        while self._used[engine] > self._room[engine]:
            key = self._oldest(engine, new)
            if key is None:
                break
            dropped.append(Dropped(key, engine))
            self._leave(key, engine)
        return dropped

    def _oldest(self, engine: int, new: Hashable) -> Hashable | None:
        """Encoding that is to go: of the oldest, one with another home; None: none may."""
        lru, oldest = self._lru[engine], list[Hashable]()
        kept = []
        for key in lru:
            if not self._may_go(key, engine, new):
                kept.append(key)
            elif len(self._encodings[key].homes) > 1:
                oldest = [key]
                break
            else:
                oldest.append(key)
            if len(oldest) == _LOOKED_AT:
                break
        for key in kept:  # so that they are not looked at again and again
            lru.move_to_end(key)
        return oldest[0] if oldest else None

    def _may_go(self, key: Hashable, engine: int, new: Hashable) -> bool:
        encoding = self._encodings[key]
        return key != new and not (encoding.is_pinned and len(encoding.homes) == 1)

    def _touch(self, key: Hashable, engine: int, tenant: str) -> None:
        self._lru[engine].move_to_end(key)
        if self._tenant_share < 1:
            self._tenants[tenant].move_to_end((key, engine))

    def _leave(self, key: Hashable, engine: int) -> None:
        encoding = self._encodings[key]
        encoding.homes.remove(engine)
        encoding.order.remove(engine)
        del self._lru[engine][key]
        self._used[engine] -= encoding.num_tokens
        if self._tenant_share < 1:
            del self._tenants[encoding.tenant][key, engine]
            self._held[encoding.tenant] -= encoding.num_tokens
        if not encoding.homes:
            self.unpin([key])
            del self._encodings[key]
