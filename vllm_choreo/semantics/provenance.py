# SPDX-License-Identifier: Apache-2.0
"""Traces that a message carries, and those that a call may read. No torch, no vllm.

A message's keys and values depend on all that its encoding attended to, and on all that this had
attended to before, whether or not it is listed: an agent's utterance carries its private plan. A
`Trace` is one node of that history. It holds ids alone, so a history outlives the messages in it.

    secret  <-  plan  <-  utterance      "<-": was encoded with

Client and engine build the same traces from the same rule (`trace_of`); the client refuses early,
the engine refuses whatever reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_choreo.errors import DeniedMessageError
from vllm_choreo.semantics.history import NO_IDS, IdSet, name_of

# Of a path through a history, as it is told: the messages next to the reader, and the denied one.
_MAX_TOLD = 16


class Trace:
    """The history of one message; immutable. No dataclass: `asdict` would unfold it into a tree.

    Attributes:
        parents: histories of what its encoding attended to.
        origin: for a copy (the same tokens, encoded anew), that of the message copied, as text.
        history: the ids of all messages in it, the message itself left out.
    """

    __slots__ = ("_name", "history", "origin", "parents")

    def __init__(
        self, message_id: str, parents: tuple[Trace, ...] = (), origin: Trace | None = None
    ) -> None:
        self._name = name_of(message_id)
        self.parents = parents
        self.origin = origin
        sources = self._sources()
        self.history: IdSet = ids_in(sources) if sources else NO_IDS

    @property
    def id(self) -> str:
        """Id of the message."""
        return self._name.id

    def __repr__(self) -> str:
        return f"Trace({self.id!r}, {len(self.parents)} parents)"

    def as_text(self) -> Trace:
        """The history of the tokens alone: what they were encoded with is left behind."""
        return Trace(self.id, (), self.origin) if self.parents else self

    def closure(self) -> frozenset[str]:
        """The ids of all messages in the history, the message itself left out."""
        seen, frontier = {self}, [self]
        while frontier:
            new = {source for source in frontier.pop()._sources() if source not in seen}
            seen |= new
            frontier += new
        return frozenset(trace.id for trace in seen if trace is not self)

    def carries(self, denied: Collection[str]) -> bool:
        """Return whether the message is one of those denied, or has one in its history."""
        return bool(denied) and self.holds_any(IdSet.known(denied))

    def holds_any(self, ids: IdSet) -> bool:
        """Do as `carries`, for a set of ids that is made once."""
        return ids.holds(self._name) or self.history.meets(ids)

    def check(self, denied: Collection[str]) -> None:
        """Refuse the call that would make this message.

        Raises:
            DeniedMessageError: it would read traces of a denied message; the path is named.
        """
        if denied and self.history.meets(ids := IdSet.known(denied)):
            raise _refusal(self, denied, ids)

    def _sources(self) -> tuple[Trace, ...]:
        return self.parents if self.origin is None else (self.origin, *self.parents)

    def __reduce__(self) -> tuple[type[Trace], tuple[object, ...]]:
        # The numbers in a set of ids are those of this process.
        return Trace, (self.id, self.parents, self.origin)


def ids_in(traces: Sequence[Trace], more: IdSet = NO_IDS) -> IdSet:
    """The ids of some messages, of all in their histories, and some more."""
    return IdSet.union([more, *(t.history for t in traces)], [t._name for t in traces])


def trace_of(
    message_id: str, parents: Sequence[Trace], reads_text: bool, origin: Trace | None = None
) -> Trace:
    """The history of a message that a call makes.

    Args:
        message_id: id of the new message.
        parents: histories of the messages that the call lists.
        reads_text: the call depends on its parents' tokens alone, as in exact and baseline mode.
        origin: history of the message whose tokens a copy takes; None: no copy.
    """
    read = tuple(parent.as_text() if reads_text else parent for parent in parents)
    return Trace(message_id, read, origin.as_text() if origin else None)


def _refusal(trace: Trace, denied: Collection[str], ids: IdSet) -> DeniedMessageError:
    """The error of a call whose message would have this history, in which something is denied."""
    parent = _towards(trace, ids)
    advice = (
        "leave it out"
        if parent.as_text().holds_any(ids)
        else "name a copy that was encoded without them (reencode), or call with mode='exact'"
    )
    path = _path(parent, denied, ids)
    names = " ← ".join(message_id.rpartition("/")[2] for message_id in path)
    return DeniedMessageError(
        f"the call would read traces of a message that is denied to it: {names}; {advice}",
        parameter="parents",
        value=path,
    )


def _path(parent: Trace, denied: Collection[str], ids: IdSet) -> list[str]:
    """Return the path from a denied message to the parent by which it came, both included.

    Of a long path, what lies between the steps next to the parent and its end is left out.
    """
    trace, path = parent, [parent.id]
    while not ids.holds(trace._name):
        if len(path) == _MAX_TOLD:
            end = next(i for i in denied if trace.carries((i,)))
            return [end, "…", *reversed(path)]
        trace = _towards(trace, ids)
        path.append(trace.id)
    return path[::-1]


def _towards(trace: Trace, ids: IdSet) -> Trace:
    """Return the source of a message that is one of `ids`, or the oldest that carries one."""
    sources = [source for source in trace._sources() if source.holds_any(ids)]
    return min(sources, key=lambda source: (not ids.holds(source._name), source._name.number))
