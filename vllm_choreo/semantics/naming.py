# SPDX-License-Identifier: Apache-2.0
"""Names of messages: a `Message`, a pending call, an id, a `save_as` name. No torch, no vllm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_choreo.errors import ChoreoError


class ParentSpan(NamedTuple):
    """A parent as a call names it: tokens `start … stop-1` of message `id`; None is its end."""

    id: str
    start: int | None = None
    stop: int | None = None


def message_id(named: object, parameter: str) -> str:
    """The id or name of a message, of a pending call, of an id, or of a `save_as` name.

    Raises:
        ChoreoError: none of these.
    """
    found = named if isinstance(named, str) else getattr(named, "id", None)
    if not isinstance(found, str):
        raise ChoreoError(
            "a message is named by its Message or its id", parameter=parameter, value=named
        )
    return found


def message_ids(messages: object, parameter: str) -> tuple[str, ...]:
    """The ids or names of a list of messages; None is an empty one.

    Raises:
        ChoreoError: no list, or as `message_id`.
    """
    return tuple(message_id(named, parameter) for named in listed(messages, parameter))


def parent_span(parent: object, parameter: str = "parents") -> ParentSpan:
    """The tokens that a caller names: a message, or `(message, start, stop)`.

    Raises:
        ChoreoError: neither. Whether there are such tokens is checked later.
    """
    if isinstance(parent, str) or not isinstance(parent, Sequence):
        return ParentSpan(message_id(parent, parameter))
    if len(parent) != 3:
        raise ChoreoError(
            "a parent is a message, an id, or (message, start, stop)",
            parameter=parameter,
            value=parent,
        )
    named, start, stop = parent
    return ParentSpan(message_id(named, parameter), start, stop)


def listed(given: object, parameter: str) -> Sequence[Any]:
    """A list of messages; None is an empty one. Raises ChoreoError: no list."""
    if given is None:
        return ()
    # A message, too, is no list; that it is no `Sequence` is what tells.
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ChoreoError(
            f"{parameter} must be a list of messages; one message: [it]",
            parameter=parameter,
            value=given,
        )
    return given
