# SPDX-License-Identifier: Apache-2.0
"""What a prompt means, computed from trees alone: which tokens stand where, and which they see.

Nothing of the package is used but its trees. A *unit* is a run of tokens that is encoded in one
context; a prompt is the units that it reads, then its own. Two ways to give a unit its numbers:

    by_mask     one dense forward of all units in one row, with explicit positions and a block mask
    by_oracle   one after the other, over keys that the oracle rotates to where they are seen
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.oracle import Encoded, Oracle, Parent
from tests.pml.trees import Words
from vllm_choreo.pml.language.tree import (
    Module,
    Param,
    Passed,
    Prompt,
    Schema,
    Text,
    Turn,
    Union,
    Use,
)

_WORDS = Words()


@dataclass(eq=False)
class Unit:
    """Tokens encoded in one context, and the parts of others that they see: `(unit, start, stop,
    position at which it is seen)`.
    """

    tokens: list[int]
    position: int
    sees: list[tuple[Unit, int, int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Run:
    """A module's tokens that nothing cuts; `gaps` are its parameters, `(name, start, length)`."""

    path: tuple[str, ...]
    start: int
    tokens: list[int]
    gaps: list[tuple[str, int, int]]
    is_cached: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


def around(role: str) -> tuple[str, str]:
    """What the template of `Words` writes around a turn."""
    before, after = _WORDS.apply_chat_template(
        [{"role": role, "content": "|"}], False, False
    ).split("|")
    return before, after


def runs_of(schema: Schema) -> list[Run]:
    """All runs, in the order in which they are written."""
    made: list[Run] = []
    _lay(schema, (), 0, True, made)
    return made


def _lay(node: Any, path: tuple[str, ...], at: int, is_cached: bool, made: list[Run]) -> int:
    """Lay a module out from position `at`; the position after it."""
    run = Run(path, at, [], [], is_cached)

    def cut() -> None:
        nonlocal run
        if run.tokens:
            made.append(run)
        run = Run(path, at, [], [], is_cached)

    for item in _flat(node):
        if isinstance(item, (str, Param)):
            if isinstance(item, Param):
                run.gaps.append((item.name, len(run.tokens), item.length))
                ids = [0] * item.length
            else:
                ids = _WORDS.encode(item)
            run.tokens += ids
            at += len(ids)
            continue
        cut()
        members = item.children if isinstance(item, Union) else (item,)
        at = max(_lay(m, (*path, m.name), at, m.cache, made) for m in members)
        cut()
    cut()
    return at


def _flat(node: Any) -> Iterator[Any]:
    """Text as strings, parameters, modules and unions."""
    for child in node.children:
        if isinstance(child, Turn):
            before, after = around(child.role)
            yield before
            yield from _flat(child)
            yield after
        elif isinstance(child, Text):
            yield child.text
        elif isinstance(child, (Param, Module, Union)):
            yield child


class Meaning:
    """The units of one prompt.

    Args:
        context: "modules" or "schema".
        layout: "schema" or "compact".
    """

    def __init__(
        self,
        schemas: Sequence[Schema],
        prompt: Prompt,
        context: str = "modules",
        layout: str = "schema",
        passed: dict[str, Unit] | None = None,
    ) -> None:
        self._schemas = {schema.name: schema for schema in schemas}
        self._context, self._compact = context, layout == "compact"
        self._passed = passed or {}
        self._stored: dict[Any, Unit] = {}
        self._row: list[tuple[Unit, int, int, int]] = []
        self._end = 0
        self._own: Unit | None = None  # the unit of new text that goes on
        self.num_modules = self.num_arguments = self.num_new = 0
        self._prompt(prompt)
        for child in prompt.children:
            if isinstance(child, Turn):
                before, after = around(child.role)
                is_open = child is prompt.children[-1] and child.role == "assistant"
                self._texts([Text(before), *child.children, Text("" if is_open else after)])
        if isinstance(prompt.children[-1], Turn) and prompt.children[-1].role != "assistant":
            self._new(_WORDS.encode(" t492 "))
        assert self._own is not None, "a prompt ends with new text"
        self.header = self._own

    # -- encodings of a schema ---------------------------------------------------------------

    def _encoded(self, schema: Schema, run: Run, together: frozenset[tuple[str, ...]]) -> Unit:
        """A run behind what it sees: the runs of `together`, or of its own context, before it."""
        key = (schema.name, run.path, run.start, together if run.path in together else None)
        if key in self._stored:
            return self._stored[key]
        unit = Unit(run.tokens, run.start)
        if run.path in together:
            seen = together
        elif self._context == "schema":
            seen = frozenset(run.path[:n] for n in range(len(run.path) + 1))
        else:
            seen = frozenset([run.path])
        others = [
            r for r in runs_of(schema) if r.path in seen and r.is_cached and r.stop <= run.start
        ]
        for other in sorted(others, key=lambda r: r.start):
            # What is in no scaffold is encoded once, whatever else is chosen.
            among = together if run.path in together else frozenset()
            before = self._encoded(schema, other, among)
            unit.sees.append((before, 0, len(before.tokens), other.start))
        self._stored[key] = unit
        return unit

    def _together(self, schema: Schema, chosen: set[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
        """The paths of the largest scaffold that is chosen (tests have one scaffold at most)."""
        for child in schema.children:
            paths = [tuple(path.split("/")) for path in getattr(child, "modules", ())]
            if paths and all(path in chosen for path in paths):
                return frozenset(p[:n] for p in paths for n in range(len(p) + 1))
        return frozenset()

    # -- the row -----------------------------------------------------------------------------

    def _prompt(self, prompt: Prompt) -> None:
        schema = self._schemas[prompt.schema]
        chosen: dict[tuple[str, ...], Any] = {}
        self._choose(prompt, (), chosen)
        together = self._together(schema, set(chosen))
        base = self._end
        runs = {id(r): r for r in runs_of(schema)}
        for run, texts in self._in_order(schema, list(runs.values()), chosen):
            if run is not None:
                arguments = dict(getattr(chosen[run.path], "arguments", ()))
                self._take(schema, run, base, arguments, together)
            self._texts(texts)
        tail = []
        for child in reversed(prompt.children):
            if isinstance(child, Use):
                break
            tail.insert(0, child)
        for child in tail:
            if isinstance(child, Prompt):
                self._prompt(child)
            elif not isinstance(child, Turn):
                self._texts([child])

    def _choose(self, use: Any, path: tuple[str, ...], chosen: dict[Any, Any]) -> None:
        chosen[path] = use
        for child in use.children:
            if isinstance(child, Use):
                self._choose(child, (*path, child.name), chosen)

    def _in_order(
        self, schema: Schema, runs: list[Run], chosen: dict[Any, Any]
    ) -> Iterator[tuple[Run | None, list[Any]]]:
        """The runs that are taken, each with the texts that stand right after it."""
        taken = [run for run in runs if run.path in chosen]
        if self._compact:
            taken = list(_reordered(schema, (), chosen, taken))
        after: dict[int | None, list[Any]] = {}
        # Of texts behind one run, those inside a module come before those behind it.
        for path, use in sorted(chosen.items(), key=lambda item: -len(item[0])):
            names = [child.name for child in use.children if isinstance(child, Use)]
            previous = None
            for child in use.children:
                if isinstance(child, Use):
                    previous = child.name
                elif isinstance(child, (Text, Passed)):
                    if (
                        not path
                        and (previous is None or previous == names[-1])
                        and previous == (names or [None])[-1]
                    ):
                        continue  # the prompt's end
                    inside = (*path, previous) if previous else path
                    last = [r for r in taken if r.path[: len(inside)] == inside]
                    after.setdefault(id(last[-1]) if last else None, []).append(child)
        for run in taken:
            yield run, after.get(id(run), [])

    def _take(
        self, schema: Schema, run: Run, base: int, arguments: dict[str, str], together: Any
    ) -> None:
        """A run as the prompt reads it, or encodes it."""
        pieces: list[tuple[int, list[int] | None, int]] = []  # start, argument or None, stop
        at = 0
        for name, start, length in run.gaps:
            if name in arguments:
                pieces += [(at, None, start), (start, _WORDS.encode(arguments[name]), start)]
                at = start + length
        pieces.append((at, None, len(run.tokens)))
        if not run.is_cached:
            self._place(base + run.start)
            for start, argument, stop in pieces:
                ids = run.tokens[start:stop] if argument is None else argument
                self.num_arguments += len(argument or ())
                self.num_new -= len(argument or ())
                self._new(ids)
            return
        unit = self._encoded(schema, run, together)
        for start, argument, stop in pieces:
            if argument is not None and argument:
                self._place(base + run.start + start)
                self.num_arguments += len(argument)
                self.num_new -= len(argument)
                self._new(argument)
            elif argument is None and stop > start:
                self._place(base + run.start + start)
                self.num_modules += stop - start
                self._see(unit, start, stop)

    def _texts(self, texts: Sequence[Any]) -> None:
        for text in texts:
            if isinstance(text, Passed):
                unit = self._passed[text.name]
                self._see(unit, 0, len(unit.tokens))
            else:
                self._new(_WORDS.encode(text.text))

    def _place(self, position: int) -> None:
        if not self._compact:
            assert position >= self._end, "new text does not fit"
            if position > self._end:
                self._own = None
            self._end = position

    def _see(self, unit: Unit, start: int, stop: int) -> None:
        self._row.append((unit, start, stop, self._end))
        self._end += stop - start
        self._own = None

    def _new(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        self.num_new += len(ids)
        if self._own is None:
            self._own = Unit([], self._end, list(self._row))
            self._row.append((self._own, 0, 0, self._end))
        self._own.tokens += ids
        self._end += len(ids)
        # It grows until something else stands after it.
        self._row[-1] = (self._own, 0, len(self._own.tokens), self._own.position)


def _reordered(schema: Any, path: tuple[str, ...], chosen: Any, taken: list[Run]) -> Iterator[Run]:
    """The runs with modules in the prompt's order, in the places of those that are chosen."""
    wanted = [(*path, child.name) for child in chosen[path].children if isinstance(child, Use)]
    inner = [run for run in taken if run.path[: len(path)] == path]
    written: list[Any] = []
    for run in inner:
        if run.path == path:
            written.append(run)
        elif run.path[: len(path) + 1] not in written:
            written.append(run.path[: len(path) + 1])
    # A module without tokens of its own, or below it, takes a place all the same.
    order = iter([p for p in wanted if p in written])
    for entry in written:
        if isinstance(entry, Run):
            yield entry
        else:
            yield from _reordered(schema, next(order), chosen, taken)


# -- numbers -------------------------------------------------------------------------------------


def by_oracle(oracle: Oracle, header: Unit, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[len(token_ids), vocab]` of the last unit, which goes on so."""
    done: dict[int, Encoded] = {}

    def encoded(unit: Unit, ids: Sequence[int]) -> Encoded:
        if id(unit) not in done:
            parents = [Parent(encoded(u, u.tokens), at, a, b) for u, a, b, at in unit.sees]
            done[id(unit)] = oracle.encode(ids, parents, unit.position)
        return done[id(unit)]

    return encoded(header, token_ids).logprobs()


def by_mask(oracle: Oracle, header: Unit, token_ids: Sequence[int]) -> torch.Tensor:
    """As `by_oracle`, in one forward; every unit is seen where it was encoded."""
    units: list[Unit] = []

    def collect(unit: Unit) -> None:
        if unit not in units:
            for other, *_ in unit.sees:
                collect(other)
            units.append(unit)

    collect(header)
    tokens = {id(unit): list(unit.tokens) for unit in units} | {id(header): list(token_ids)}
    begins, total = {}, 0
    for unit in units:
        begins[id(unit)] = total
        total += len(tokens[id(unit)])
    seen = torch.zeros(total, total, dtype=torch.bool)
    for unit in units:
        at, size = begins[id(unit)], len(tokens[id(unit)])
        seen[at : at + size, at : at + size] = torch.ones(size, size, dtype=torch.bool).tril()
        for other, start, stop, position in unit.sees:
            assert position == other.position + start, "seen elsewhere"
            seen[at : at + size, begins[id(other)] + start : begins[id(other)] + stop] = True
    ids = [token for unit in units for token in tokens[id(unit)]]
    positions = [unit.position + i for unit in units for i in range(len(tokens[id(unit)]))]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = oracle.model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0]
    return logits[begins[id(header)] :].log_softmax(-1)
