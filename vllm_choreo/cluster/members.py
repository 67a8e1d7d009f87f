# SPDX-License-Identifier: Apache-2.0
"""Members of a deployment: the replicas that Serve routes to, as a router of this process heard.

Serve tells its routers of every replica that starts, is stopped or has ended. A router runs in a
thread of its own; whoever listens is told there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Listener = Callable[[Sequence[str]], object]


class Members:
    """Ids of the replicas of one deployment, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: tuple[str, ...] = ()
        self._listeners: list[Listener] = []

    def update(self, ids: Sequence[str]) -> None:
        """Take the ids of all replicas that there are now."""
        with self._lock:
            left = [name for name in self._ids if name in ids]
            self._ids = (*left, *(name for name in ids if name not in left))
            told = list(self._listeners)
        for listener in told:
            listener(self._ids)

    def listen(self, listener: Listener) -> None:
        """Have a function called with the ids now, and whenever they are told of."""
        with self._lock:
            self._listeners.append(listener)
        listener(self._ids)


_members: dict[str, Members] = {}
_members_lock = threading.Lock()


def members_of(app: str, deployment: str) -> Members:
    """The members of a deployment, the same object for all of this process."""
    with _members_lock:
        return _members.setdefault(f"{app}/{deployment}", Members())
