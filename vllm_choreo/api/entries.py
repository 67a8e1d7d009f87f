# SPDX-License-Identifier: Apache-2.0
"""The messages of a session by id, on the client's side: pending, complete, failed or freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.errors import (
    ChoreoError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    ParentFailedError,
    UnknownMessageError,
)
from vllm_choreo.semantics.message import Call, Message


@dataclass(frozen=True)
class _Freed:
    """What is left of a message that was freed: its id stays taken, for ids are never reused."""


class Entries:
    """What has become of each id: a Call while it is generated, then its Message or the error.

    Args:
        session: the id of the session; ids are `session/name`.
        limits: has `max_messages_per_session` and `max_tokens_per_session`; None: no limits.
    """

    def __init__(self, session: str, limits: Any = None) -> None:
        self.session = session
        self.closed = False
        self._limits = limits
        self._states: dict[str, Call | Message | ChoreoError | _Freed] = {}
        self._num_tokens: dict[str, int] = {}  # of those that are pending or complete

    @property
    def num_tokens(self) -> int:
        """Of all messages that are pending or complete; of pending ones as far as it is known."""
        return sum(self._num_tokens.values())

    def started(self, calls: Iterable[Call]) -> None:
        """Reserve the ids of planned calls."""
        for call in calls:
            self._states[call.id] = call
            self._num_tokens[call.id] = len(call.token_ids)

    def withdrawn(self, calls: Iterable[Call]) -> None:
        """Give the ids of calls back that were not submitted."""
        for call in calls:
            del self._states[call.id], self._num_tokens[call.id]

    def finished(self, call: Call, result: Message | ChoreoError) -> None:
        """Record how a call ended. One that ended after the session was closed leaves no trace."""
        if self.closed:
            return
        self._states[call.id] = result
        if isinstance(result, Message):
            self._num_tokens[call.id] = result.num_tokens
        else:
            self._num_tokens.pop(call.id, None)

    def freed(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            self._states[message_id] = _Freed()
            self._num_tokens.pop(message_id, None)

    def close(self) -> bool:
        """Forget everything; False if that was done before."""
        was_open, self.closed = not self.closed, True
        self._states.clear()
        self._num_tokens.clear()
        return was_open

    # -- looking up --------------------------------------------------------------------------

    def messages(self) -> dict[str, Message]:
        """The live messages by id."""
        return {key: state for key, state in self._states.items() if isinstance(state, Message)}

    def resolve(self, parameter: str, named: Any) -> str:
        """The id of a message, of a pending call, of an id, or of a `save_as` name."""
        named = named if isinstance(named, str) else getattr(named, "id", None)
        if not isinstance(named, str):
            raise ChoreoError(
                "a message is named by its Message or its id", parameter=parameter, value=named
            )
        return named if "/" in named else f"{self.session}/{named}"

    def get(self, parameter: str, message_id: str) -> Call | Message:
        """The live entry of an id.

        Raises:
            UnknownMessageError, FreedMessageError, ParentFailedError: why there is none.
        """
        state = self._states.get(message_id)
        if isinstance(state, (Call, Message)):
            return state
        if isinstance(state, ChoreoError):
            raise ParentFailedError(
                f"the call that should have made this message failed ({state}); call it again",
                parameter=parameter,
                value=message_id,
            )
        if isinstance(state, _Freed):
            raise FreedMessageError(
                "the message was freed; free messages after their last use",
                parameter=parameter,
                value=message_id,
            )
        raise UnknownMessageError(
            "no message of this session; the calls of one list do not see one another, and "
            "messages of other sessions are out of reach",
            parameter=parameter,
            value=message_id,
        )

    def complete(self, parameter: str, named: Any) -> Message:
        """A complete message by whatever names it.

        Raises:
            UnknownMessageError, FreedMessageError, ParentFailedError: as `get`.
            ChoreoError: the message is still being generated, or the session is closed.
        """
        self.check_open()
        message_id = self.resolve(parameter, named)
        entry = self.get(parameter, message_id)
        if isinstance(entry, Call):
            raise ChoreoError(
                "the message is still being generated: await it first",
                parameter=parameter,
                value=message_id,
            )
        return entry

    def denied(self, given: Any) -> tuple[str, ...]:
        """The ids of messages that are to be denied; freed ones are accepted.

        Raises:
            ChoreoError: no list.
            UnknownMessageError: no such message was ever made in this session.
        """
        if given is None:
            return ()
        if isinstance(given, (str, Message)) or not isinstance(given, Sequence):
            raise ChoreoError("deny must be a list of messages", parameter="deny", value=given)
        self.check_open()
        ids = tuple(self.resolve("deny", named) for named in given)
        for message_id in ids:
            if message_id not in self._states:
                raise UnknownMessageError(
                    "no message of this session; make it before you deny it",
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

    def check_new(self, calls: Sequence[Call]) -> None:
        """Refuse calls whose names are taken, or for which there is no room."""
        seen: set[str] = set()
        for call in calls:
            state = self._states.get(call.id)
            # The name of a failed call may be used again: there is no message of that name.
            taken = state is not None and not isinstance(state, ChoreoError)
            if taken or call.id in seen:
                raise NameTakenError(
                    "a message of this name exists, or existed: choose another name",
                    parameter="save_as",
                    value=call.id.partition("/")[2],
                )
            seen.add(call.id)
        if self._limits is not None:
            self._check_limits(calls)

    def _check_limits(self, calls: Sequence[Call]) -> None:
        num_messages = len(self._num_tokens) + len(calls)
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
