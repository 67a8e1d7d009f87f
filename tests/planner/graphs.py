# SPDX-License-Identifier: Apache-2.0
"""Random graphs of operators, for property tests; seeded, so that a failure can be run again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from vllm_choreo.planner import Msg, Planner, build, ops
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.logical.op import Op
from vllm_choreo.planner.pipeline import LOGICAL, run_passes
from vllm_choreo.planner.plan import Plan, Target


def planner_without(facade: Any, *parts: str, **options: Any) -> Planner:
    """A planner that leaves out parts of its way, named as in `Target.without`."""
    planner = Planner(facade, **options)
    planner.target = replace(planner.target, without=frozenset(parts))
    return planner


def tasks_of(compiled: CompiledGraph, *without: str) -> Plan:
    """A plan with its tasks alone."""
    return run_passes(Plan(compiled, Target(without=frozenset(without))), LOGICAL)


SYSTEMS = ("Be brief. " * 20, "Be exact. " * 20, "You are a judge of answers. " * 10)

INPUTS = ("one", "two", *("A long context. " * 8 + end for end in ("one", "two", "Two, or more")))


def shout(text: str) -> str:
    return text.upper()


def words(text: str) -> list[str]:
    return [text[:2], text[2:4], text[4:]]


def is_even(text: str) -> bool:
    return len(text) % 2 == 0


_KINDS = ["llm"] * 5 + ["fmt", "fmt", "fn", "list", "item", "switch"]
_KINDS += ["complete", "history", "chat", "chat"]


class RandomGraph:
    """A graph of every kind of operator, some twice, some that no output needs.

    With `turns`, some values are those of the query after, and of the first one in the last.
    """

    def __init__(
        self, seed: int, num_ops: int = 18, sampled: bool = False, turns: bool = False
    ) -> None:
        self._random = random.Random(seed)
        self._sampled = sampled
        self._kinds = [*_KINDS, *["turn"] * 3 * turns]
        self._texts: list[Op] = [ops.placeholder("a"), ops.placeholder("b")]
        self._lists: list[Op] = []
        self._histories: list[Op] = []
        for _ in range(num_ops):
            self._add()

    def compile(self, batch: int = 3) -> CompiledGraph:
        count = min(len(self._texts), self._random.randint(1, 3))
        results = self._random.sample(self._texts[2:], count) if count else self._texts[:1]
        used = build(results).placeholders
        draw = self._random.choice
        # Few different values, some of which begin alike, so that queries have much in common.
        inputs = {name: [draw(INPUTS) for _ in range(batch)] for name in ("a", "b")}
        return build(results).compile(**{name: inputs[name] for name in used})

    def _text(self) -> Op:
        return self._random.choice(self._texts)

    def _add(self) -> None:
        kind = self._random.choice(self._kinds)
        kind = "llm" if kind == "item" and not self._lists else kind
        if kind in ("chat", "complete", "history"):
            self._add_chat(kind)
        elif kind == "turn":
            source = self._text()
            parts = ops.batch_slice(source, 1), ops.batch_slice(source, 0, 1)
            self._texts.append(ops.batch_concat(*parts))
        elif kind == "llm":
            turns = [Msg("system", self._random.choice(SYSTEMS))]
            turns += [Msg("user", self._text()) for _ in range(self._random.randint(1, 3))]
            sampled = self._sampled and self._random.random() < 0.3
            sampling = {"temperature": 1.0} if sampled else {}
            self._texts.append(ops.llm(turns, sampling={"max_tokens": 8, **sampling}))
        elif kind == "fmt":
            order = self._random.choice(["fixed", "any"])
            parts = [self._text(), self._random.choice(["-", "+"]), self._text()]
            self._texts.append(ops.concat(*parts, sep=self._random.choice(["", " "]), order=order))
        elif kind == "fn":
            self._texts.append(ops.fn(shout, self._text()))
        elif kind == "list":
            self._lists.append(ops.fn(words, self._text(), returns="list"))
        elif kind == "item":
            source = ops.slice(self._random.choice(self._lists), 0, 3)
            self._texts.append(ops.item(source, self._random.randint(0, 2)))
        else:
            key = ops.fn(is_even, self._text(), returns="value")
            self._texts.append(ops.switch(key, {True: self._text()}, self._text()))

    def _add_chat(self, kind: str) -> None:
        """A completion, or a history: written, chosen while the plan runs, read, or taken apart."""
        sampling = {"max_tokens": 8}
        if kind == "complete":
            prompt = self._random.choice(
                [
                    self._text(),
                    ops.fmt("{} and {}", self._text(), self._text()),
                    ops.fmt("{}, so ", self._text()),
                ]
            )
            self._texts.append(ops.complete(prompt, sampling=sampling))
        elif kind == "history" or not self._histories:
            said = [Msg("user", self._text()), Msg("assistant", self._text())]
            before = self._random.choice([None, *self._histories])
            made: Op = ops.chat(said if before is None else [before, *said])
            if before is not None and self._random.random() < 0.5:
                made = ops.switch(
                    ops.fn(is_even, self._text(), returns="value"), {True: made}, before
                )
            self._histories.append(made)
        else:
            history = self._random.choice(self._histories)
            turn = [Msg("system", self._random.choice(SYSTEMS)), history, Msg("user", self._text())]
            self._texts.append(ops.llm(turn, sampling=sampling))
            self._texts.append(ops.item(ops.slice(history, -2), 1))
