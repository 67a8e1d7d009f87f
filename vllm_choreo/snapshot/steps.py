# SPDX-License-Identifier: Apache-2.0
"""Saving and loading as generators that ask the engine and are told; who drives them does the rest.

A program on an `LLM` answers at once, one on an AsyncLLM awaits the answer and lets the generator
read and write its files in a thread, an engine's core answers itself, in pieces between its steps.
Whatever goes wrong is raised where the generator asked, which may ask for more to tidy up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ask:
    """A request to the engine, yielded by a generator.

    Attributes:
        what: "operation", of the scheduler; "workers", a method of each; "encode": have messages
            encoded that are not; or "session": call a function where the session's calls are
            planned, for no thread but that one may change what the session knows.
        args: the name of the operation or method and its arguments; the ids of messages; or the
            function and its arguments.
    """

    what: str
    args: tuple[Any, ...]


def operation(name: str, *args: object) -> Ask:
    """Ask for an operation of the scheduler; `snapshot_` before its name is left out."""
    return Ask("operation", (f"snapshot_{name}", *args))


def workers(method: str, *args: object) -> Ask:
    """Ask for a method of the workers."""
    return Ask("workers", (method, *args))


def session(function: Callable[..., Any], *args: object) -> Ask:
    """Ask for a function of the session."""
    return Ask("session", (function, *args))


Steps = Generator[Ask, Any, _T]


@dataclass(frozen=True)
class _Done(Generic[_T]):
    result: _T


def _advance(steps: Steps[_T], answer: object, error: BaseException | None) -> Ask | _Done[_T]:
    try:
        return steps.send(answer) if error is None else steps.throw(error)
    except StopIteration as stop:
        return _Done(stop.value)


def drive(steps: Steps[_T], answer: Callable[[Ask], object]) -> _T:
    """Run a generator to the end.

    Args:
        answer: gives the answer to an `Ask`.
    """
    pieces = in_pieces(steps, answer, lambda: False)
    try:
        next(pieces)
    except StopIteration as stop:
        return cast(_T, stop.value)
    raise AssertionError("it is one piece")


def in_pieces(
    steps: Steps[_T], answer: Callable[[Ask], object], is_enough: Callable[[], bool]
) -> Generator[None, None, _T]:
    """Run a generator with pauses: this one yields whenever it has done enough for now.

    An exception that is thrown in a pause is raised where the generator asked. It is not to be
    closed there: generators that it has called would be, too, and could not tidy up.

    Args:
        answer: gives the answer to an `Ask`.
        is_enough: returns whether it is time for a pause, after each answer.
    """
    found = _advance(steps, None, None)
    while isinstance(found, Ask):
        told: object = None
        error: BaseException | None = None
        try:
            told = answer(found)
            if is_enough():
                yield
        except BaseException as raised:  # also Ctrl-C: blocks are to be let go
            error = raised
        found = _advance(steps, told, error)
    return found.result


async def drive_async(steps: Steps[_T], answer: Callable[[Ask], Awaitable[object]]) -> _T:
    """Run a generator to the end, in a thread wherever the engine is not asked."""
    found = await _in_thread(steps, None, None)
    while isinstance(found, Ask):
        told: object = None
        error: BaseException | None = None
        try:
            told = await answer(found)
        except BaseException as raised:
            error = raised
        found = await _in_thread(steps, told, error)
    return found.result


async def _in_thread(
    steps: Steps[_T], told: object, error: BaseException | None
) -> Ask | _Done[_T]:
    """Take one step; a caller's cancellation meanwhile is raised where the next answer comes."""
    step = asyncio.ensure_future(asyncio.to_thread(_advance, steps, told, error))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError as cancelled:
        found = await step
        if isinstance(found, _Done):
            raise
        return await _in_thread(steps, None, cancelled)
