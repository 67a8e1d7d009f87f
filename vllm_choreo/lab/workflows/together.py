# SPDX-License-Identifier: Apache-2.0
"""Programs side by side on one facade: calls that they make at a time go in one list.

A step that decodes for one program reads the weights as often as one that decodes for eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.parallel import results_of
from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Message

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Asked:
    """Calls that one program waits for.

    Attributes:
        seat: number of the program.
        kind: method of the facade.
        items: its calls, one dict each; or the messages to free.
        answer: the messages, one for each call.
    """

    seat: int
    kind: str
    items: Sequence[Any]
    answer: Future[list[Any]] = field(default_factory=Future)


class _Seat(FacadeWrapper):
    """The `Facade` of one program: its calls wait until all programs wait."""

    def __init__(self, c: Facade, number: int, inbox: SimpleQueue[_Asked | None]) -> None:
        super().__init__(c)
        self._number, self._inbox = number, inbox

    def free(self, *messages: Named) -> None:
        """Free messages; see `Choreography.free`."""
        self._ask("free", messages)

    def _prefill(self, calls: list[Item]) -> list[Message]:
        return self._ask("prefill", calls)

    def _decode(self, calls: list[Item]) -> list[Message]:
        return self._ask("decode", calls)

    def _ask(self, kind: str, items: Sequence[Any]) -> list[Any]:
        asked = _Asked(self._number, kind, items)
        self._inbox.put(asked)
        return asked.answer.result()


def run_together(
    c: Facade, programs: Sequence[Callable[[Facade], Made]]
) -> list[Made | ChoreoError]:
    """Run programs in one session, each in a thread that waits while the engine works.

    Args:
        c: a facade. Only the caller's thread calls it.
        programs: each makes calls of the facade that it is given.

    Returns:
        The result of each, or the error that it ended with; the others go on.

    Raises:
        BaseException: what else a program or the facade raised, Ctrl-C included; all have ended.
    """
    if not programs:
        return []
    inbox: SimpleQueue[_Asked | None] = SimpleQueue()

    def ran(number: int, program: Callable[[Facade], Made]) -> Made | ChoreoError:
        try:
            return program(_Seat(c, number, inbox))
        except ChoreoError as error:
            return error
        finally:
            inbox.put(None)

    with ThreadPoolExecutor(len(programs)) as pool:
        running = [pool.submit(ran, number, program) for number, program in enumerate(programs)]
        _serve(c, inbox, len(programs))
        return [one.result() for one in running]


def all_made(results: Sequence[Made | ChoreoError]) -> list[Made]:
    """The results of `run_together`, where all are needed.

    Raises:
        ChoreoError: the first error among them.
    """
    made: list[Made] = []
    for result in results:
        if isinstance(result, ChoreoError):
            raise result
        made.append(result)
    return made


def _serve(c: Facade, inbox: SimpleQueue[_Asked | None], num_running: int) -> None:
    """Answer until all programs have ended, also where the facade fails."""
    waiting: list[_Asked] = []
    try:
        while num_running:
            asked = inbox.get()
            if asked is None:
                num_running -= 1
            else:
                waiting.append(asked)
            if len(waiting) == num_running:
                _answer(c, sorted(waiting, key=lambda one: one.seat))
                waiting = []
    finally:
        for asked in waiting:
            if not asked.answer.done():
                asked.answer.set_exception(CancelledError())
        while num_running:
            asked = inbox.get()
            if asked is None:
                num_running -= 1
            else:
                asked.answer.set_exception(CancelledError())


def _answer(c: Facade, waiting: Sequence[_Asked]) -> None:
    for kind in dict.fromkeys(asked.kind for asked in waiting):
        of_kind = [asked for asked in waiting if asked.kind == kind]
        items = [item for asked in of_kind for item in asked.items]
        make = partial(_freed, c) if kind == "free" else getattr(c, kind)
        _tell(of_kind, results_of(make, items))


def _freed(c: Facade, messages: Sequence[Any]) -> Sequence[Any]:
    c.free(*messages)
    return messages


def _tell(waiting: Sequence[_Asked], results: Sequence[Any]) -> None:
    """Give each its own part of the results, or the first error in that part."""
    start = 0
    for asked in waiting:
        part = list(results[start : start + len(asked.items)])
        start += len(asked.items)
        errors = [result for result in part if isinstance(result, ChoreoError)]
        if errors:
            asked.answer.set_exception(errors[0])
        else:
            asked.answer.set_result(part)
