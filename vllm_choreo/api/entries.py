# SPDX-License-Identifier: Apache-2.0
"""The messages of a session by id, on the client's side: pending or complete, and what is gone.

A session may run for weeks, so what it keeps of messages that were freed, and of calls that failed,
is bounded:

    numbers    the session counts them: one below the counter that is not live is gone
    names      the latest `MAX_GONE`, and those whose `Message` the caller still holds; others are
               forgotten, and can be given again
    errors     their text alone
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.errors import (
    ChoreoError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    ParentFailedError,
    UnknownMessageError,
)
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.history import IdSet
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import message_id as named_id
from vllm_choreo.semantics.provenance import Trace, ids_in
from vllm_choreo.semantics.session_options import SessionLimits

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput

# Of messages that were freed and calls that failed: how many are remembered by their ids. About
# 150 bytes each.
MAX_GONE = 10_000
_FREED = ""  # what is remembered of a message that was freed; of a failed call its error's text


class Entries:
    """States of a session's ids: a pending call, then its Message; or gone.

    Args:
        session: the id of the session; ids are `session/name`.
        limits: limits of its messages; None: none.
        keeps_pictures: whether the pictures of messages are kept here, as in baseline mode.

    Attributes:
        num_tokens: tokens of all messages, complete or pending; of pending ones those known yet.
        count: ids that are numbers were given below it; the session counts.
    """

    def __init__(
        self, session: str, limits: SessionLimits | None = None, *, keeps_pictures: bool = False
    ) -> None:
        self.session = session
        self._keeps_pictures = keeps_pictures
        self.closed = False
        self.num_tokens = 0
        self.count = 0
        self._limits = limits
        self._live: dict[str, PlannedCall | Message] = {}
        # In baseline mode, of messages that show some: nobody else holds them.
        self._pictures: dict[str, MultiModalInput] = {}
        self._writers: dict[str, str] = {}  # of messages that the engine's model has not written
        self._gone: OrderedDict[str, str] = OrderedDict()
        # While somebody holds a freed message, its id must not come to mean another one.
        self._held: WeakValueDictionary[str, Message] = WeakValueDictionary()
        # What the live messages are, and carry; None: it is to be found out when it is asked for.
        self._carried: IdSet | None = None

    def started(self, calls: Iterable[PlannedCall]) -> None:
        """Reserve the ids of planned calls."""
        for call in calls:
            self._gone.pop(call.id, None)
            self._enter(call.id, call)

    def admit(self, messages: Sequence[Message]) -> None:
        """Enter messages that were loaded. Raises NameTakenError, LimitError: as `check_new`."""
        self.check_new(messages)
        for message in messages:
            self._gone.pop(message.id, None)
            self._enter(message.id, message)

    def withdrawn(self, calls: Iterable[PlannedCall]) -> None:
        """Give the ids of calls back that were not submitted."""
        for call in calls:
            self._leave(call.id)

    def finished(self, call: PlannedCall, result: Result) -> None:
        """Record how a call ended. One that ended after the session was closed leaves no trace."""
        if self._live.get(call.id) is not call:
            return
        if isinstance(result, Message):
            self._enter(call.id, result)
            if self._keeps_pictures and (shown := self.shown_by(call)):
                self._pictures[call.id] = shown
        else:
            self._leave(call.id)
            self._remember(call.id, str(result) or type(result).__name__)

    def freed(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            message = self._leave(message_id)
            if not self._was_numbered(message_id):
                self._remember(message_id, _FREED)
            if isinstance(message, Message):
                self._held[message_id] = message

    def close(self) -> bool:
        """Forget everything; False if that was done before."""
        was_open, self.closed = not self.closed, True
        self._live.clear()
        self._pictures.clear()
        self._writers.clear()
        self._gone.clear()
        self.num_tokens = 0
        return was_open

    def _enter(self, message_id: str, entry: PlannedCall | Message) -> None:
        before = self._live.get(message_id)
        self.num_tokens += len(entry.token_ids) - (len(before.token_ids) if before else 0)
        self._live[message_id] = entry
        if before is None and self._carried is not None:
            self._carried = ids_in([_trace(entry)], self._carried)

    def _leave(self, message_id: str) -> PlannedCall | Message | None:
        entry = self._live.pop(message_id, None)
        self._writers.pop(message_id, None)
        self._pictures.pop(message_id, None)
        if entry is not None:
            self.num_tokens -= len(entry.token_ids)
            self._carried = None
        return entry

    def _remember(self, message_id: str, reason: str) -> None:
        self._gone[message_id] = reason
        self._gone.move_to_end(message_id)
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _was_freed(self, message_id: str) -> bool:
        """Return whether the id is known to be a freed message's; or an old failed call's."""
        if message_id in self._gone:
            return self._gone[message_id] == _FREED
        return message_id in self._held or self._was_numbered(message_id)

    def _was_numbered(self, message_id: str) -> bool:
        session, _, name = message_id.partition("/")
        is_number = name.isascii() and name.isdecimal() and str(int(name[:19])) == name
        return session == self.session and is_number and int(name) < self.count

    # -- who has written them ----------------------------------------------------------------

    def set_writer(self, message_id: str, weights: str) -> None:
        """Record whose keys and values a live message has: digest of an adapter's or a model's."""
        if message_id in self._live:
            self._writers[message_id] = weights

    def writer(self, message_id: str) -> str | None:
        """Digest of the weights that have written a message; None: the engine's own model."""
        return self._writers.get(message_id)

    # -- looking up --------------------------------------------------------------------------

    def messages(self) -> dict[str, Message]:
        """The live messages by id."""
        return {key: entry for key, entry in self._live.items() if isinstance(entry, Message)}

    @property
    def is_limited(self) -> bool:
        """True if a session may hold so much and no more, as on a server."""
        return self._limits is not None

    def pictures(self, message_id: str) -> MultiModalInput | None:
        """Prompt of the call that made a message, with its pictures; None: it shows none."""
        return self._pictures.get(message_id)

    def shown_by(self, call: PlannedCall) -> MultiModalInput | None:
        """Prompt of a call with its pictures, or with those of the message that it copies."""
        return call.prompt or self.pictures(call.params.copy_of or "")

    def is_live(self, message_id: str) -> bool:
        """Return whether there is such a message, or a call that makes it."""
        return message_id in self._live

    def resolve(self, named: str) -> str:
        """Return the id of a message that is named by its id or its `save_as` name."""
        return named if "/" in named else f"{self.session}/{named}"

    def get(self, parameter: str, message_id: str) -> PlannedCall | Message:
        """The live entry of an id.

        Raises:
            UnknownMessageError, FreedMessageError, ParentFailedError: why there is none.
        """
        if message_id in self._live:
            return self._live[message_id]
        if failure := self._gone.get(message_id):
            raise ParentFailedError(
                f"the call that should have made this message failed ({failure}); call it again",
                parameter=parameter,
                value=message_id,
            )
        if self._was_freed(message_id):
            known = message_id in self._gone or message_id in self._held
            raise FreedMessageError(
                f"the message was freed{'' if known else ', or its call failed'}; free messages "
                "after their last use",
                parameter=parameter,
                value=message_id,
            )
        forgotten = "; it may be one that was freed long ago" if len(self._gone) >= MAX_GONE else ""
        raise UnknownMessageError(
            f"this session has no such message{forgotten}: make it in an earlier call, with "
            "save_as or by the id that it gets; messages of other sessions cannot be read",
            parameter=parameter,
            value=message_id,
        )

    def trace(self, parameter: str, message_id: str) -> Trace:
        """The history of a live entry. Raises as `get`."""
        return _trace(self.get(parameter, message_id))

    def complete(self, parameter: str, named: Named) -> Message:
        """A complete message by whatever names it.

        Raises:
            UnknownMessageError, FreedMessageError, ParentFailedError: as `get`.
            ChoreoError: the message is still being generated, or the session is closed.
        """
        self.check_open()
        message_id = self.resolve(named_id(named, parameter))
        entry = self.get(parameter, message_id)
        if isinstance(entry, PlannedCall):
            raise ChoreoError(
                "the message is still being generated: await it first",
                parameter=parameter,
                value=message_id,
            )
        return entry

    def denied(self, names: Sequence[str]) -> tuple[str, ...]:
        """The ids of messages that are to be denied, each once; freed ones are accepted.

        A name that is neither live nor remembered is accepted if a live message carries its
        traces. If none does, denying it would change nothing; it is refused, for a name that was
        misspelt must not permit what it was meant to deny.

        Raises:
            UnknownMessageError: no such message was ever made in this session, or it is forgotten.
        """
        ids = tuple(dict.fromkeys(map(self.resolve, names)))
        unknown = {i for i in ids if i not in self._live and i not in self._gone}
        unknown = {i for i in unknown if not self._was_freed(i)}
        if unknown:
            if self._carried is None:
                self._carried = ids_in([_trace(entry) for entry in self._live.values()])
            unknown = {i for i in unknown if i not in self._carried}
        for message_id in ids:
            if message_id in unknown:
                raise UnknownMessageError(
                    "no message of this session, and none that a message carries traces of: make "
                    "it before you deny it, or leave it out if it was freed long ago",
                    parameter="deny",
                    value=message_id,
                )
        return ids

    # -- checks ------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed:
            raise FreedMessageError(
                "the session is closed and its messages are freed; open another Choreography",
                parameter="session",
                value=self.session,
            )

    def check_new(self, calls: Sequence[PlannedCall | Message]) -> None:
        """Refuse calls, or loaded messages, whose names are taken or that have no room."""
        self.check_names([call.id for call in calls])
        if self._limits is not None:
            self._check_limits(calls)

    def check_names(self, message_ids: Sequence[str]) -> None:
        """Check that no id is taken or occurs twice. Raises NameTakenError: one does."""
        seen: set[str] = set()
        for message_id in message_ids:
            # The name of a failed call may be used again: there is no message of that name.
            is_freed = self._gone.get(message_id) == _FREED or message_id in self._held
            if message_id in self._live or is_freed or message_id in seen:
                raise NameTakenError(
                    "this session has, or had, a message of this name: choose another name, or "
                    "open a session for each run of a program",
                    parameter="save_as",
                    value=message_id.partition("/")[2],
                )
            seen.add(message_id)

    def _check_limits(self, calls: Sequence[PlannedCall | Message]) -> None:
        num_messages = len(self._live) + len(calls)
        num_tokens = self.num_tokens + sum(len(call.token_ids) for call in calls)
        for name, wanted in (("messages", num_messages), ("tokens", num_tokens)):
            limit = getattr(self._limits, f"max_{name}_per_session")
            if wanted > limit:
                raise LimitError(
                    f"a session may hold {limit} {name} (server.max_{name}_per_session): free "
                    "messages, or open another session",
                    parameter="session",
                    value=f"{wanted} {name}",
                )


def _trace(entry: PlannedCall | Message) -> Trace:
    assert entry.trace is not None, "the session traces what it makes"
    return entry.trace
