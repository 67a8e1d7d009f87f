# SPDX-License-Identifier: Apache-2.0
"""Programs: operations on an engine as plain data. No torch, no vllm.

A program prints itself as Python that makes it again, and what is left when any of its operations
are deleted is a program, too: what is named and was never made is refused, or left out, by rules
that the ledger knows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

# The sessions of a program, and whose they are.
TENANTS = {"a": "alice", "b": "bob", "c": "alice"}


@cache
def text(number: int, count: int) -> tuple[int, ...]:
    """The first `count` tokens of a text. Programs share texts, so that messages have twins."""
    rng = random.Random(number)
    return tuple(rng.randrange(3, 512) for _ in range(count))


class _Printed:
    """Prints what differs from the defaults."""

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                shown.append(repr(value))
            elif value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Read(_Printed):
    """A parent as a call lists it: tokens `start … stop-1` of a message, seen from `offset` on."""

    name: str
    start: int | None = None
    stop: int | None = None
    offset: int | None = None


@dataclass(frozen=True, repr=False)
class Call(_Printed):
    """A choreographed call.

    Attributes:
        session: of the call; it makes the message `name` there.
        text: number and count of its own tokens, see `text`.
        generate: tokens at most; 0: a prefill.
        repair, exact, new_offset, deny, copy_of: as `ChoreoParams` has them.
        keep: layers of which hidden states are kept.
        adapter: 0: none.
        stop: stop strings.
        stop_ids: so many tokens end it.
        seed: greedy without.
        scores: so many of the likeliest tokens are told at each of its own tokens; None: none.
        end_after: steps until the client tells where a call with stop strings ends.
        pictures: place among its own tokens and number of each picture, in their order.
    """

    session: str
    name: str
    text: tuple[int, int]
    reads: tuple[Read, ...] = ()
    new_offset: int | None = None
    generate: int = 0
    repair: Any = None
    exact: bool = False
    keep: tuple[int, ...] = ()
    adapter: int = 0
    copy_of: str | None = None
    deny: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: int = 0
    seed: int | None = None
    scores: int | None = None
    priority: int = 0
    end_after: int = 0
    pictures: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return text(*self.text)


@dataclass(frozen=True, repr=False)
class Ordinary(_Printed):
    """A request that knows nothing of choreography."""

    name: str
    text: tuple[int, int]
    generate: int = 1
    adapter: int = 0
    priority: int = 0
    pictures: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return text(*self.text)


@dataclass(frozen=True, repr=False)
class Steps(_Printed):
    """So many steps of the engine."""

    count: int = 1


@dataclass(frozen=True, repr=False)
class Settle(_Printed):
    """Steps until everything is answered."""


@dataclass(frozen=True, repr=False)
class Free(_Printed):
    session: str
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Evict(_Printed):
    session: str
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Pin(_Printed):
    session: str
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Unpin(_Printed):
    session: str
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Close(_Printed):
    """All messages of a session are given up; its calls go on."""

    session: str


@dataclass(frozen=True, repr=False)
class Abort(_Printed):
    """The client of a call, or of an ordinary request, goes away."""

    name: str


@dataclass(frozen=True, repr=False)
class Save(_Printed):
    """Begin to save messages under `key`, and let the save ask the engine `asks` times at once."""

    session: str
    key: str
    names: tuple[str, ...]
    encodings: bool = True
    asks: int = 99


@dataclass(frozen=True, repr=False)
class Load(_Printed):
    """Begin to load what was saved under `key`.

    Attributes:
        suffix: of the messages' names.
        is_foreign: what was saved is not trusted: nobody shares it.
    """

    session: str
    key: str
    suffix: str = ""
    asks: int = 99
    is_foreign: bool = False


@dataclass(frozen=True, repr=False)
class Asks(_Printed):
    """All saves and loads that are under way ask the engine so many times more."""

    count: int = 1


@dataclass(frozen=True, repr=False)
class Pause(_Printed):
    """The scheduler starts nothing; what runs goes on if it is to drain."""

    drain: bool = False


@dataclass(frozen=True, repr=False)
class Resume(_Printed):
    """The scheduler goes on."""


@dataclass(frozen=True, repr=False)
class Reset(_Printed):
    """`reset_prefix_cache`: all keys and values that nobody reads are dropped."""


Operation = (
    Call
    | Ordinary
    | Steps
    | Settle
    | Free
    | Evict
    | Pin
    | Unpin
    | Close
    | Abort
    | Save
    | Load
    | Asks
    | Pause
    | Resume
    | Reset
)


@dataclass(frozen=True)
class Program:
    """Operations on the engine of a configuration."""

    configuration: str
    operations: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def as_test(self, name: str) -> str:
        """A test of pytest that runs it, to be pasted into `test_feature_machine.py`."""
        lines = "".join(f"        {operation!r},\n" for operation in self.operations)
        return (
            f"def test_{name}(machine_of: MachineOf) -> None:\n"
            f'    run(machine_of("{self.configuration}"),\n{lines}    )\n'
        )
