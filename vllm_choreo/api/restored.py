# SPDX-License-Identifier: Apache-2.0
"""Records of a session in front of several engines, from which another process goes on with it.

A record holds recipes, no keys and values: whoever reads a message of a session that was taken over
has it made again, under its id.

    opened      made  made  freed  made ...  closed         what is told of a session, in order
    `SessionRecord`: what there is of it now
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm_choreo.api.entries import MAX_GONE
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe, bound_recipe, named_by
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.provenance import Trace, trace_of
from vllm_choreo.semantics.session_options import SessionOptions

# Of a message that was made, in place of its history, which its parents' records give.
_NO_TRACE = Trace("")


@dataclass(frozen=True)
class MadeMessage:
    """A message that was made: the call that makes it again, and its handle.

    Attributes:
        id: id of the message.
        named: ids of the messages that the call names.
        content: call and handle, pickled and without their history: whoever keeps records need
            not know vLLM's classes.
    """

    id: str
    named: tuple[str, ...]
    content: bytes

    @classmethod
    def of(cls, recipe: CallRecipe, message: Message) -> MadeMessage:
        """Record of a message that has just been made."""
        call = replace(recipe.call, trace=_NO_TRACE)
        content = pickle.dumps((call, replace(message, trace=None)))
        return cls(message.id, tuple(named_by(call)), content)

    def read(self) -> tuple[PlannedCall, Message]:
        """Return the call and the handle."""
        call, message = pickle.loads(self.content)
        return call, message


@dataclass
class SessionRecord:
    """A session, as it is taken over.

    Attributes:
        id, tenant: those of the session.
        content: the options that it was opened with, pickled; see `options`.
        is_default: True if the tenant's requests that name no session are in this one.
        messages: its messages by id, in the order in which they were made; those that were freed
            are among them while another one was encoded behind them.
        freed: ids of the latter.
        gone: ids of messages that were freed, the latest last, as far as a session remembers them.
        count: its calls that give no name are numbered from here on.
    """

    id: str
    tenant: str
    content: bytes
    is_default: bool = False
    messages: dict[str, MadeMessage] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    gone: dict[str, None] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, session: str, options: SessionOptions) -> SessionRecord:
        """Record of a session that has just been opened."""
        content = pickle.dumps(replace(options, limits=None, on_choice=None))
        return cls(session, options.tenant, content)

    @property
    def options(self) -> SessionOptions:
        """Options with which to open the session again, under its id; without a server's own."""
        options: SessionOptions = pickle.loads(self.content)
        return replace(options, session_id=self.id)

    def add(self, record: MadeMessage) -> None:
        """Enter a message that was made."""
        self.messages[record.id] = record
        name = record.id.partition("/")[2]
        if name.isdecimal():
            self.count = max(self.count, int(name) + 1)

    def free(self, ids: Iterable[str]) -> None:
        """Note that messages were freed, and forget those that no other one needs."""
        ids = list(ids)
        self.gone.update(dict.fromkeys(ids))
        while len(self.gone) > MAX_GONE:
            del self.gone[next(iter(self.gone))]
        self.freed.update(i for i in ids if i in self.messages)
        if 2 * len(self.freed) >= len(self.messages):
            self._sweep()

    def _sweep(self) -> None:
        """Forget what was freed and no other message was encoded behind."""
        needed = [i for i in self.messages if i not in self.freed]
        reached = set(needed)
        while needed:
            for parent in self.messages[needed.pop()].named:
                if parent in self.messages and parent not in reached:
                    reached.add(parent)
                    needed.append(parent)
        self.messages = {i: r for i, r in self.messages.items() if i in reached}
        self.freed &= reached

    def restored(self) -> tuple[list[CallRecipe], list[Message]]:
        """Recipes of all messages, and the messages that were not freed, with their histories."""
        recipes: dict[str, CallRecipe] = {}
        messages = []
        for record in self.messages.values():
            call, message = record.read()
            recipe = recipes[record.id] = bound_recipe(_traced(call, recipes), recipes)
            if record.id not in self.freed:
                messages.append(replace(message, trace=recipe.call.trace))
        return [r for i, r in recipes.items() if i not in self.freed], messages


def _traced(call: PlannedCall, recipes: dict[str, CallRecipe]) -> PlannedCall:
    """A call with the history of the message that it makes."""
    params = call.params
    parents = [recipes[span.id].call.trace for span in params.parents]
    origin = recipes[params.copy_of].call.trace if params.copy_of else None
    return replace(call, trace=trace_of(call.id, parents, params.exact, origin))


class SessionJournal(Protocol):
    """Journal of what happens in sessions, from which another process goes on with them."""

    def opened(self, session: str, options: SessionOptions) -> None: ...

    def used_by_default(self, session: str) -> None: ...

    def made(self, session: str, recipe: CallRecipe, message: Message) -> None: ...

    def freed(self, session: str, ids: Sequence[str]) -> None: ...

    def closed(self, session: str) -> None: ...
