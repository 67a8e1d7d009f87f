# SPDX-License-Identifier: Apache-2.0
"""What a message carries traces of, and which traces a call may read. No torch, no vllm.

A message's keys and values depend on all that its encoding attended to, and on all that this had
attended to before, whether or not it is listed: an agent's utterance carries its private plan. A
`Trace` is one node of that history. It holds ids alone, so a history outlives the messages in it.

    secret  <-  plan  <-  utterance      "<-": was encoded with

Client and engine build the same traces from the same rule (`trace_of`); the client refuses early,
the engine refuses whatever reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vllm_choreo.errors import DeniedMessageError


class Trace:
    """The history of one message; immutable. No dataclass: `asdict` would unfold it into a tree.

    Attributes:
        id: of the message.
        parents: histories of what its encoding attended to.
        origin: for a copy (the same tokens, encoded anew), that of the message copied, as text.
    """

    __slots__ = ("id", "origin", "parents")

    def __init__(
        self, message_id: str, parents: tuple[Trace, ...] = (), origin: Trace | None = None
    ) -> None:
        self.id = message_id
        self.parents = parents
        self.origin = origin

    def __repr__(self) -> str:
        return f"Trace({self.id!r}, {len(self.parents)} parents)"

    def as_text(self) -> Trace:
        """The history of the tokens alone: what they were encoded with is left behind."""
        return Trace(self.id, (), self.origin) if self.parents else self

    def closure(self) -> frozenset[str]:
        """The ids of all messages in the history, the message itself left out."""
        return frozenset(trace.id for trace, _ in self._walk()[1:])

    def carries(self, denied: Collection[str]) -> bool:
        """Whether the message is one of those denied, or has one in its history."""
        return bool(denied) and any(trace.id in denied for trace, _ in self._walk())

    def check(self, denied: Collection[str]) -> None:
        """Refuse the call that would make this message.

        Raises:
            DeniedMessageError: it would read traces of a denied message; the path is named.
        """
        if not denied:
            return
        steps = self._walk()
        for index, (trace, _) in enumerate(steps):
            if index and trace.id in denied:
                raise _refusal(_path(steps, index), denied)

    def _walk(self) -> list[tuple[Trace, int]]:
        """Every node of the history, nearest first, and the index of the node that led to it."""
        steps = [(self, 0)]
        seen = {self}
        for index, (trace, _) in enumerate(steps):  # grows while it is walked
            for source in (trace.origin, *trace.parents):
                if source is not None and source not in seen:
                    seen.add(source)
                    steps.append((source, index))
        return steps


def histories_hold(traces: Iterable[Trace], ids: Collection[str]) -> set[str]:
    """Those of `ids` that one of the messages has, or carries traces of. Each node is seen once."""
    wanted, frontier = frozenset(ids), list(traces)
    found: set[str] = set()
    seen: set[Trace] = set()
    while frontier:
        trace = frontier.pop()
        if trace in seen:
            continue
        seen.add(trace)
        found |= {trace.id} & wanted
        frontier += [*trace.parents, *([trace.origin] if trace.origin else [])]
    return found


def trace_of(
    message_id: str, parents: Sequence[Trace], reads_text: bool, origin: Trace | None = None
) -> Trace:
    """The history of a message that a call makes.

    Args:
        message_id: of the new message.
        parents: of the messages that the call lists.
        reads_text: the call depends on its parents' tokens alone, as in exact and baseline mode.
        origin: of the message whose tokens it takes, for a copy.
    """
    read = tuple(parent.as_text() if reads_text else parent for parent in parents)
    return Trace(message_id, read, origin.as_text() if origin else None)


def _path(steps: Sequence[tuple[Trace, int]], index: int) -> list[Trace]:
    """From a node of the history to the parent by which it came, both included."""
    path = []
    while index:
        trace, index = steps[index]
        path.append(trace)
    return path


def _refusal(path: Sequence[Trace], denied: Collection[str]) -> DeniedMessageError:
    names = " ← ".join(trace.id.rpartition("/")[2] for trace in path)
    advice = (
        "leave it out"
        if path[-1].as_text().carries(denied)
        else "name a copy that was encoded without them (reencode), or call with mode='exact'"
    )
    return DeniedMessageError(
        f"the call would read traces of a message that is denied to it: {names}; {advice}",
        parameter="parents",
        value=[trace.id for trace in path],
    )
