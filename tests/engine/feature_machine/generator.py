# SPDX-License-Identifier: Apache-2.0
"""From a seed to a program: situations in which features meet, drawn one after the other.

A situation is a few operations that belong together, of random size and with random options. What a
program has much of, it draws first: so one is full of repairs, another of saves, a third of calls
that are aborted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.engine.feature_machine import rules
from tests.engine.feature_machine.configurations import Configuration, configuration_of
from tests.engine.feature_machine.program import (
    Abort,
    Asks,
    Call,
    Close,
    Evict,
    Free,
    Load,
    Operation,
    Ordinary,
    Pause,
    Pin,
    Program,
    Read,
    Reset,
    Resume,
    Save,
    Settle,
    Steps,
    Unpin,
)
from tests.engine.feature_machine.shown import drawn as pictures_among

# Around block borders padding changes.
_LENGTHS = (1, 2, 5, 16, 31, 32, 33, 40, 63, 64, 65, 90, 96, 97)
_NUM_TEXTS = 10


def program_of(configuration: str, seed: int) -> Program:
    """The program of a seed for the engine of that name."""
    return _Generator(configuration_of(configuration), seed).program()


class _Generator:
    """
    Attributes:
        names: of the messages that each session should have, and how many tokens at least.
    """

    def __init__(self, configuration: Configuration, seed: int) -> None:
        self._configuration = configuration
        self._rng = random.Random(f"{configuration.name} {seed}")
        # What was added later is drawn by itself, so that the programs of old seeds are the same.
        self._later = random.Random(f"{configuration.name} {seed} later")
        self._operations: list[Operation] = []
        self._names: dict[str, dict[str, int]] = {session: {} for session in "abc"}
        self._decodes: set[str] = set()
        self._kept: dict[str, tuple[str, list[str]]] = {}  # by key: session and names
        self._count = 0
        rng = self._rng
        # How often operations follow one another without a step between them.
        self._density = rng.choice((0.3, 0.6, 0.85, 1.0))
        self._repairs = rng.choice((0.0, 0.2, 0.5, 0.9))
        self._exacts = rng.choice((0.0, 0.1, 0.4))
        self._oddities = rng.choice((0.0, 0.0, 0.1))
        self._priorities = rng.random() < 0.7
        kinds = [*rules.KINDS]
        if "fp8" in configuration:
            kinds.remove("attention")  # which blocks get most depends on what was rounded how
        self._rules = rng.sample(kinds, 3)
        if "hidden" in configuration and rng.random() < 0.6:
            self._rules.append("layers")

    def program(self) -> Program:
        situations = self._situations()
        kinds, weights = zip(*situations, strict=True)
        if self._configuration.begins_full:
            self._repairs_beside_twins()
        else:
            self._stock()
        target = self._rng.randint(9, 22)
        while len(self._operations) < target:
            (situation,) = self._rng.choices(kinds, weights)
            situation()
            self._pause_between()
        self._probes()
        return Program(self._configuration.name, tuple(self._operations))

    def _situations(self) -> list[tuple[Callable[[], None], float]]:
        has, rng = self._configuration.__contains__, self._rng
        plain: list[tuple[Callable[[], None], float]] = [
            (self._batch, 5),
            (self._stock, 1),
            (self._fill, 1.5),
            (self._evict_and_read, 2),
            (self._free_in_use, 1.5),
            (self._abort_a_parent, 1.5),
            (self._refused_parent, 0.7),
            (self._tight_repairs, 1.5),
            (self._keep_and_load, 2),
            (self._long_header, 0.3),
            (self._long_answer, 0.4),
            (self._ordinary, 1),
            (self._pins, 0.4),
            (self._pause, 0.5),
            (self._reset, 0.3),
            (self._close, 0.2),
            (self._stops, 0.8),
            (self._lost_layers, 2 if has("hidden") else 0),
            (self._load_over_evicted, 2 if has("host") else 0.3),
        ]
        if self._configuration.has_states:
            plain.append((self._shared_beginnings, 2))
        # A program has much of some, and nothing of others.
        return [(one, weight * rng.choice((0, 1, 1, 1, 4)) + 1e-6) for one, weight in plain]

    # -- parts -----------------------------------------------------------------------------

    def _add(self, operation: Operation) -> None:
        self._operations.append(operation)

    def _session(self) -> str:
        return self._rng.choices("abc", (5, 3, 1.5))[0]

    def _text(self, most: int = 97, least: int = 1) -> tuple[int, int]:
        rng = self._rng
        lengths = [length for length in _LENGTHS if least <= length <= most] or [least]
        length = rng.choice(lengths) if rng.random() < 0.7 else rng.randint(least, max(least, most))
        number = rng.randrange(3) if rng.random() < 0.3 else rng.randrange(_NUM_TEXTS)
        return number, length

    def _name(self, session: str) -> str:
        if self._oddities and self._rng.random() < self._oddities and self._names[session]:
            return self._rng.choice(list(self._names[session]))
        self._count += 1
        return f"m{self._count - 1}"

    def _chosen(self, session: str, most: int = 3) -> list[str]:
        """Some messages of the session, the latest more often; with repetitions."""
        names = list(self._names[session])
        if not names:
            return []
        count = self._rng.choices(range(most + 1), [1, *[3] * most])[0]
        weights = [1 + 2 * index / len(names) for index in range(len(names))]
        return self._rng.choices(names, weights, k=count)

    def _call(
        self,
        session: str | None = None,
        reads: Sequence[Read] | None = None,
        generate: int | None = None,
        text: tuple[int, int] | None = None,
        **options: Any,
    ) -> str:
        """Add a call with what was given, and random options besides; its message's name."""
        rng, session = self._rng, session or self._session()
        name = self._name(session)
        if generate is None:
            generate = rng.choice((0, 0, 0, 1, 2, 3, 5))
        if reads is None:
            reads = self._reads(session, generate > 0)
        is_drawn = text is None
        text = text or self._text(40 if generate else 97)
        options = {**self._options(session, reads, generate), **options}
        if self._configuration.reads_chains:
            options["exact"] = True
        if options.get("exact") or self._configuration.reads_chains:
            options.pop("repair", None)
        if self._configuration.composes and not options.get("exact"):
            # No part of a message has a state, and a call needs those of all its parents.
            reads = [replace(read, start=None, stop=None) for read in reads]
            if "repair" in options:
                options["repair"] = rules.first_tokens(self._rng, reads, self._names[session])
        if options.get("exact"):
            reads = [Read(read.name, read.start, read.stop) for read in reads]
            options.pop("new_offset", None)
        if is_drawn and self._configuration.has_pictures:
            options["pictures"] = pictures_among(rng, text[1])
        call = Call(session, name, text, tuple(reads), generate=generate, **options)
        self._add(call)
        self._names[session][name] = text[1] + 6 * len(call.pictures)
        if generate:
            self._decodes.add(name)
        return name

    def _reads(self, session: str, is_decode: bool = True) -> list[Read]:
        rng = self._rng
        if not is_decode and rng.random() < 0.4:
            return []
        reads = [self._part(session, name) for name in self._chosen(session)]
        if reads and rng.random() < 0.2:
            reads = [
                Read(r.name, r.start, r.stop, rng.choice((None, 0, 7, 40, 150))) for r in reads
            ]
        if self._oddities and rng.random() < self._oddities:
            reads.append(Read(rng.choice(("m999", *self._names["b"], *self._names["a"]))))
        return reads

    def _part(self, session: str, name: str) -> Read:
        rng, count = self._rng, self._names[session].get(name, 1)
        if rng.random() < 0.75:
            return Read(name)
        start = rng.randrange(count)
        stop = rng.choice((None, rng.randint(start + 1, count)))
        if rng.random() < 0.03:
            stop = count + rng.randint(1, 5)  # perhaps one too far
        return Read(name, start or None, stop)

    def _options(self, session: str, reads: Sequence[Read], generate: int) -> dict[str, Any]:
        rng, configuration = self._rng, self._configuration
        options: dict[str, Any] = {}
        if reads and rng.random() < self._repairs:
            options["repair"] = self._rule(session, reads)
        elif reads and rng.random() < self._exacts:
            options["exact"] = True
        if rng.random() < 0.1:
            options["new_offset"] = rng.choice((0, 3, 64, 200))
        if "hidden" in configuration and rng.random() < 0.45:
            options["keep"] = rng.choice(((1,), (1, 2), (1, 2), (2,)))
        if configuration.num_adapters and rng.random() < 0.5:
            options["adapter"] = rng.randint(0, configuration.num_adapters)
        if "priority" in configuration and self._priorities:
            options["priority"] = rng.choice((0, 0, 1, 2))
        if generate and rng.random() < 0.15:
            options["seed"] = rng.randrange(100)
        if generate and rng.random() < 0.1:
            options["stop_ids"] = 200
        if self._later.random() < 0.2:
            options["scores"] = self._later.choice((0, 2))
        if reads and rng.random() < 0.05 and self._names[session]:
            options["copy_of"] = rng.choice(list(self._names[session]))
        if rng.random() < 0.05 and self._names[session]:
            options["deny"] = (rng.choice(list(self._names[session])),)
        return options

    def _rule(self, session: str, reads: Sequence[Read]) -> Any:
        kind = self._rng.choice(self._rules)
        return rules.rule(self._rng, kind, reads, self._names[session])

    def _pause_between(self) -> None:
        rng = self._rng
        if rng.random() < self._density:
            if rng.random() < 0.4:
                self._add(Steps(rng.choice((1, 1, 2, 3))))
        elif rng.random() < 0.5:
            self._add(Settle())
        else:
            self._add(Steps(rng.choice((1, 2, 3, 5))))

    def _steps(self, *counts: int) -> None:
        if count := self._rng.choice(counts):
            self._add(Steps(count))

    def _blocks_held(self) -> int:
        """Of all messages that the program has made and not freed, about."""
        size = self._configuration.block_size
        return sum(-(-n // size) for names in self._names.values() for n in names.values())

    # -- situations ------------------------------------------------------------------------

    def _stock(self, session: str | None = None) -> None:
        """Messages to be read later."""
        session = session or self._session()
        for _ in range(self._rng.randint(1, 3)):
            self._call(session, [] if self._rng.random() < 0.7 else None, 0)
        if self._rng.random() < 0.7:
            self._add(Settle())

    def _batch(self) -> None:
        """Calls at once."""
        session = self._session()
        for _ in range(self._rng.randint(1, 3)):
            self._call(session if self._rng.random() < 0.8 else None)

    def _fill(self) -> None:
        """The pool is full."""
        room = self._configuration.num_whole_blocks - self._blocks_held()
        session, blocks = self._session(), max(2, min(room, 8))
        while blocks > 0:
            count = self._rng.choice((32, 64, 96, 90))
            self._call(session, [], 0, (self._rng.randrange(_NUM_TEXTS), count))
            blocks -= -(-count // self._configuration.block_size)
        self._steps(0, 2, 4)

    def _evict_and_read(self) -> None:
        session, rng = self._session(), self._rng
        if not self._names[session]:
            return self._stock(session)
        names = list(self._names[session])
        chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
        if rng.random() < 0.5:
            self._add(Settle())
        self._add(Evict(session, tuple(chosen)))
        self._steps(0, 0, 1)
        if rng.random() < 0.8:
            self._call(session, [self._part(session, name) for name in chosen])
        return None

    def _free_in_use(self) -> None:
        """Calls read what is freed while they run or wait."""
        session, rng = self._session(), self._rng
        if not self._names[session]:
            return self._stock(session)
        name = rng.choice(list(self._names[session]))
        for _ in range(rng.randint(1, 2)):
            self._call(session, [self._part(session, name), *self._reads(session)][:3])
        self._steps(0, 1, 2)
        self._forget(session, [name])
        return None

    def _forget(self, session: str, names: Sequence[str]) -> None:
        self._add(Free(session, tuple(names)))
        for name in names:
            self._names[session].pop(name, None)

    def _abort_a_parent(self) -> None:
        session, rng = self._session(), self._rng
        long = rng.random() < 0.6
        generate = rng.choice((0, 0, 4))
        text = self._text(97, 60) if long else None
        parent = self._call(session, None, generate, text)
        child = self._call(session, [Read(parent), *self._reads(session)][:2])
        self._steps(0, 1, 1, 2)
        self._add(Abort(rng.choice((parent, parent, child))))
        if rng.random() < 0.4:
            self._call(session, [Read(child)])

    def _refused_parent(self) -> None:
        """A call that is refused when its place is decided, and children at the same moment."""
        session, rng = self._session(), self._rng
        if len(self._names[session]) < 2:
            self._stock(session)
        names = list(self._names[session])
        reads = [Read(name) for name in rng.choices(names, k=2)] if names else []
        kind, options = rng.randrange(4), {}
        if kind == 0 or not reads:
            options = {"new_offset": self._configuration.max_model_len}
        elif kind == 1:
            first = self._names[session][reads[0].name]
            start = rng.randrange(first)
            runs = ((start, start + 1),)
            options = {"repair": tuple(() if read is not reads[1] else runs for read in reads)}
        elif kind == 2:
            reads = [Read(reads[0].name, 0, 500)]
        else:
            options = {"repair": {"layers": [1, 3]}}
        parent = self._call(session, reads, 0, exact=False, **options)
        for _ in range(rng.randint(1, 2)):
            self._call(session, [Read(parent), *self._reads(session)][:2])

    def _tight_repairs(self) -> None:
        """Repaired calls at once, in a pool that is nearly full."""
        session, rng = self._session(), self._rng
        if len(self._names[session]) < 2:
            self._stock(session)
        names = list(self._names[session])
        if rng.random() < 0.6:
            self._fill()
        if rng.random() < 0.5:
            self._add(Evict(session, tuple(rng.sample(names, min(2, len(names))))))
        for _ in range(rng.randint(1, 3)):
            reads = [Read(name) for name in rng.choices(names, k=rng.randint(2, 4))]
            rule = self._rule(session, reads)
            self._call(session, reads, repair=rule, exact=False)

    def _repairs_beside_twins(self) -> None:
        """Repaired calls at once, where fewer blocks can be given up than are counted.

        Messages of one text share blocks, so giving up one of them frees little. Nothing runs: so
        the place that a patch was given may be taken again, in the same planning.
        """
        session, rng = self._session(), self._rng
        names = self._fill_but(3, session)
        if rng.random() < 0.5:
            self._add(Evict(session, (rng.choice(names),)))
            self._add(Settle())
        twin = rng.randrange(_NUM_TEXTS), rng.choice((64, 90, 96, 97))
        for _ in range(rng.choice((2, 2, 3))):
            self._call(session, [], 0, twin, exact=False, keep=())
        self._add(Settle())
        for _ in range(rng.choice((2, 2, 3))):
            reads = [Read(name) for name in rng.choices(names, k=rng.randint(2, 6))]
            lengths = self._names[session]
            rule = tuple(rules.short_runs(rng, read, lengths) for read in reads)
            self._call(session, reads, rng.choice((0, 3)), self._text(8), repair=rule, exact=False)
        self._steps(0, 0, 1)
        self._call(session, [Read(rng.choice(names))], 3, self._text(8))
        self._add(Settle())

    def _fill_but(self, num_blocks: int, session: str) -> list[str]:
        """Fill the pool one by one, but for so many blocks; the messages, two at least."""
        room, names = self._configuration.num_whole_blocks - num_blocks, []
        while len(names) < 2 or self._blocks_held() < room:
            text = self._rng.randrange(_NUM_TEXTS), self._rng.choice((32, 33, 64, 64, 96, 128, 256))
            names.append(self._call(session, [], 0, text, exact=False, keep=()))
            self._add(Settle())
        return names

    def _keep_and_load(self) -> None:
        """What was saved comes back while other calls run."""
        session, rng = self._session(), self._rng
        names = list(self._names[session])
        if not self._kept or rng.random() < 0.5:
            if not names:
                return self._stock(session)
            if rng.random() < 0.8:
                self._add(Settle())
            chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
            key, has_keys = rng.choice("xy"), rng.random() < 0.8
            self._add(Save(session, key, tuple(chosen), has_keys, rng.choice((99, 99, 2, 4))))
            self._kept[key] = session, chosen
            if rng.random() < 0.4:
                self._forget(session, chosen)
            return None
        self._load()
        return None

    def _load(self) -> None:
        rng = self._rng
        key = rng.choice(list(self._kept))
        session, names = self._kept[key]
        target = rng.choice({"a": "aac", "c": "acc", "b": "bb"}[session])
        if rng.random() < 0.03:
            target = "b" if session != "b" else "a"
        self._count += 1
        suffix = rng.choice(("", f".{self._count}", f".{self._count}"))
        asks = rng.choice((99, 99, 1, 3))
        self._add(Load(target, key, suffix, asks, rng.random() < 0.15))
        for name in names:
            self._names[target].setdefault(f"{name}{suffix}", 1)
        if asks < 99 and rng.random() < 0.7:
            self._batch()
            self._add(Asks(rng.choice((1, 3, 99))))
        if rng.random() < 0.8:
            self._call(target, [Read(f"{name}{suffix}") for name in names][:3])

    def _load_over_evicted(self) -> None:
        """Blocks that an eviction has given back are filled by a load at once."""
        rng = self._rng
        if not self._kept:
            session = self._session()
            if not self._names[session]:
                self._call(session, [], 0, self._text(97, 40))
            self._add(Settle())
            chosen = rng.sample(list(self._names[session]), 1)
            self._add(Save(session, "x", tuple(chosen), True))
            self._kept["x"] = session, chosen
            if rng.random() < 0.7:
                self._forget(session, chosen)
        if rng.random() < 0.7:
            self._fill()
            self._add(Settle())
        session = self._session()
        if names := list(self._names[session]):
            evicted = rng.sample(names, rng.randint(1, min(4, len(names))))
            self._add(Evict(session, tuple(evicted)))
            if rng.random() < 0.3:
                self._forget(session, evicted[:1])
        self._load()

    def _lost_layers(self) -> None:
        """What is repaired by layers is given up meanwhile."""
        session, rng = self._session(), self._rng
        first = self._call(session, [], 0, self._text(64))
        message = self._call(session, [Read(first)], 0, self._text(64, 5), keep=(1,), exact=False)
        if rng.random() < 0.8:
            self._add(Settle())
        answer = self._call(session, [], rng.choice((3, 6)), self._text(20), keep=(1,))
        reads = [Read(message), Read(answer)]
        layers = {"layers": list(rng.choice(((1, 3), (1, 2))))}
        calls: list[dict[str, Any]] = [{"repair": layers, "exact": False}, {"exact": True}, {}]
        for options in rng.sample(calls, rng.randint(1, 3)):
            self._call(session, reads if rng.random() < 0.8 else reads[::-1], **options)
        self._steps(0, 1, 2, 3)
        self._forget(session, [message])

    def _long_header(self) -> None:
        """A header at the very edge of the context."""
        rng, session = self._rng, self._session()
        length = self._configuration.max_model_len - rng.choice((0, 1, 1, 2, 2, 3))
        reads: list[Read] = []
        names = [name for name in self._names[session] if name not in self._decodes]
        if names and rng.random() < 0.6:
            reads = [Read(rng.choice(names))]
            size = self._configuration.block_size
            length -= size * -(-self._names[session][reads[0].name] // size)
        text = rng.randrange(_NUM_TEXTS), max(1, length)
        self._call(session, reads, rng.choice((0, 1, 3)), text, exact=False, keep=())

    def _long_answer(self) -> None:
        """An answer that may be as long as it likes, and is short; or that outgrows the pool."""
        rng = self._rng
        if rng.random() < 0.6:
            self._call(None, None, rng.choice((40, 100_000)), stop_ids=250, seed=rng.randrange(99))
        else:
            self._call(None, None, rng.choice((33, 70)), seed=None, stop_ids=0)

    def _ordinary(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 2)):
            self._count += 1
            adapters = self._configuration.num_adapters
            self._add(
                Ordinary(
                    f"o{self._count}",
                    self._text(97),
                    rng.randint(1, 5),
                    rng.randint(0, adapters) if rng.random() < 0.4 else 0,
                    rng.choice((0, 1)) if "priority" in self._configuration else 0,
                )
            )
        if rng.random() < 0.15:
            self._steps(0, 1, 2)
            self._add(Abort(f"o{self._count}"))

    def _shared_beginnings(self) -> None:
        """Ordinary requests with one beginning, which find states that others have left."""
        rng, number = self._rng, self._rng.randrange(_NUM_TEXTS)
        for _ in range(rng.randint(2, 5)):
            self._count += 1
            length = rng.choice((33, 64, 65, 96, 97, 130, 170))
            self._add(Ordinary(f"o{self._count}", (number, length), rng.choice((1, 3, 40))))
            self._steps(0, 1, 2, 5)
        if rng.random() < 0.3:
            self._add(Abort(f"o{self._count}"))

    def _pins(self) -> None:
        session, rng = self._session(), self._rng
        if names := self._chosen(session):
            self._add(Pin(session, tuple(names)))
            self._steps(0, 1)
            if rng.random() < 0.4:
                self._add(Unpin(session, tuple(names)))

    def _pause(self) -> None:
        rng = self._rng
        if rng.random() < 0.5:
            self._batch()
            self._steps(0, 1)
        self._add(Pause(rng.random() < 0.5))
        if rng.random() < 0.8:
            self._batch()
        self._steps(1, 3)
        self._add(Resume())

    def _reset(self) -> None:
        if self._rng.random() < 0.5:
            self._add(Settle())
        self._add(Reset())

    def _close(self) -> None:
        session = self._session()
        self._add(Close(session))
        self._names[session].clear()

    def _stops(self) -> None:
        """A call that ends at a string, and calls that read what it will have said."""
        session, rng = self._session(), self._rng
        stop = tuple(rng.sample("0123456789", rng.randint(1, 3)))
        name = self._call(
            session, None, rng.choice((3, 6)), stop=stop, end_after=rng.choice((0, 0, 1, 3))
        )
        if rng.random() < 0.7:
            self._call(session, [Read(name), *self._reads(session)][:2])
        self._steps(0, 1, 2, 4)
        if rng.random() < 0.2:
            self._add(Abort(name))
        if rng.random() < 0.2:
            self._forget(session, [name])

    def _probes(self) -> None:
        """In the end some messages are read once more, each by a call of its own."""
        rng = self._rng
        self._add(Settle())
        for session, names in self._names.items():
            for name in rng.sample(list(names), min(len(names), rng.choice((0, 1, 2)))):
                self._count += 1
                self._add(
                    Call(
                        session,
                        f"m{self._count}",
                        (3, 2),
                        (Read(name),),
                        generate=rng.choice((1, 2)),
                        exact=self._configuration.reads_chains,
                    )
                )
