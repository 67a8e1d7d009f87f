# SPDX-License-Identifier: Apache-2.0
"""Moves of messages between engines, as far as an engine's core does them itself.

Keys and values go from its workers into files in memory that the other engine's core reads: whoever
orders a move, an API server or a replica, sees none of them. A large message goes in pieces,
between which the engine takes its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

from vllm_choreo.semantics.message import Saved
from vllm_choreo.snapshot.moving import MoveOrder, exporting, importing
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.steps import Ask, Steps, in_pieces

MOVE_OPERATIONS = ("export_message", "import_message", "continue_move", "cancel_move")
# Keys and values of so many bytes are read or written between two steps.
_PIECE_BYTES = 32 * 2**20

_T = TypeVar("_T")
# What an operation answers: "saved", "loaded" (tokens), "is_incomplete" or "is_under_way".
Answer = dict[str, object]


class _IncompleteError(Exception):
    """Not all of the message is encoded; its last token, as a rule."""


class _GivenUpError(Exception):
    """Whoever ordered the move wants it no more."""


class MessageMoves:
    """Saves and loads of moved messages in one engine's core.

    Operations take and return plain data. Whoever orders a move chooses its `name`; an answer with
    "is_under_way" asks for `continue_move`, or for `cancel_move`.

    Args:
        run_operation: runs an operation of the scheduler by its name; raises what refuses it.
        ask_workers: runs a method of every worker.
        piece_bytes: keys and values that are read or written before an answer.
    """

    def __init__(
        self,
        run_operation: Callable[[str, Sequence[Any]], Any],
        ask_workers: Callable[[str, tuple[Any, ...]], list[Any]],
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        self._run_operation = run_operation
        self._ask_workers = ask_workers
        self._piece_bytes = piece_bytes
        self._under_way: dict[str, Generator[None, None, Answer]] = {}
        self._num_bytes = 0

    def export_message(
        self, name: str, path: str, order: Sequence[Any], origin: Mapping[str, Any]
    ) -> Answer:
        """Write the files of a message.

        Args:
            path: folder for them, which is not there yet.
            order: fields of a `MoveOrder`.
            origin: fields of the `Origin` that the message has here.

        Raises:
            ChoreoError: see `exporting`.
        """
        steps = exporting(MoveOrder(*order), Path(path), Origin(**origin))
        return self._begin(name, steps, self._answer, _saved)

    def import_message(
        self, name: str, path: str, order: Sequence[Any], target: Mapping[str, Any]
    ) -> Answer:
        """Load the message whose files these are, under its scratch name.

        Raises:
            ChoreoError: see `importing`.
        """
        told: dict[str, Any] = {}

        def answer(ask: Ask) -> object:
            found = self._answer(ask)
            if ask.args[0] == "snapshot_commit":
                told.update(cast(Mapping[str, Any], found))
            return found

        steps = importing(MoveOrder(*order), Path(path), Origin(**target))
        return self._begin(name, steps, answer, lambda _: {"loaded": told["tokens"]})

    def continue_move(self, name: str) -> Answer:
        """Do the next piece; raises as what began it."""
        pieces = self._under_way.pop(name)
        self._num_bytes = 0
        try:
            next(pieces)
        except StopIteration as stop:
            return cast(Answer, stop.value)
        except _IncompleteError:
            return {"is_incomplete": True}
        self._under_way[name] = pieces
        return {"is_under_way": True}

    def cancel_move(self, name: str) -> None:
        """Give a move up, if it is still under way; what it held is let go."""
        pieces = self._under_way.pop(name, None)
        self._num_bytes = 0  # what tidies up is not to pause
        if pieces is not None:
            with suppress(_GivenUpError):
                pieces.throw(_GivenUpError())

    def _begin(
        self,
        name: str,
        steps: Steps[_T],
        answer: Callable[[Ask], object],
        told: Callable[[_T], Answer],
    ) -> Answer:
        def pieces() -> Generator[None, None, Answer]:
            return told((yield from in_pieces(steps, answer, self._is_enough)))

        self._under_way[name] = pieces()
        return self.continue_move(name)

    def _is_enough(self) -> bool:
        return self._num_bytes >= self._piece_bytes

    def _answer(self, ask: Ask) -> object:
        """Answer what a save or a load asks."""
        if ask.what == "session":
            function, *args = ask.args
            return cast(object, function(*args))
        if ask.what == "encode":
            raise _IncompleteError
        name, *args = ask.args
        if ask.what == "workers":
            found = self._ask_workers(name, tuple(args))
            self._num_bytes += sum(len(data) for data in (*found, *args) if _is_data(data))
            return found
        told = self._run_operation(name, args)
        if name == "snapshot_describe":
            told["resident"] = []  # no copies of it: whoever reads such makes them
        return told


def _saved(saved: Saved) -> Answer:
    return {"saved": astuple(saved)}


def _is_data(value: object) -> TypeGuard[bytes | memoryview]:
    return isinstance(value, bytes | memoryview)
