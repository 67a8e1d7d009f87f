# SPDX-License-Identifier: Apache-2.0
"""Random workflows as data: the same calls on any facade, whatever engines are behind it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams

from tests.engine.oracle import random_tokens
from vllm_choreo.semantics.message import Message

_NUM_GENERATED = 6
Step = tuple[str, Any]


def greedy(num_tokens: int = _NUM_GENERATED) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def draw_workflow(rng: random.Random, num_steps: int = 12) -> list[Step]:
    """Steps: lists of calls of one kind, and messages to free or to evict."""
    lengths: dict[str, int] = {}
    steps: list[Step] = []
    count = 0
    for _ in range(num_steps):
        kind = rng.choice(("prefill", "prefill", "decode", "decode", "decode", "free", "evict"))
        if kind in ("free", "evict"):
            if len(lengths) > 3:
                chosen = rng.sample(sorted(lengths), 1)
                steps.append((kind, chosen))
                for name in chosen if kind == "free" else ():
                    del lengths[name]
            continue
        calls = []
        made = {}
        for _ in range(rng.choice((1, 1, 2, 3))):
            name, count = f"m{count}", count + 1
            tokens = random_tokens(rng, rng.choice((1, 5, 31, 32, 33, 70)))
            key = "tokens" if kind == "prefill" else "header"
            calls.append({key: tokens, "save_as": name, **_options(rng, lengths)})
            made[name] = len(tokens) + (_NUM_GENERATED if kind == "decode" else 0)
        steps.append((kind, calls))
        lengths |= made
    return steps


def _options(rng: random.Random, lengths: dict[str, int]) -> dict[str, Any]:
    names = rng.choices(sorted(lengths), k=rng.randint(0, 3)) if lengths else []
    parents: list[Any] = []
    for name in names:
        start = rng.randrange(lengths[name]) if rng.random() < 0.3 else 0
        parents.append((name, start, None) if start else name)
    options: dict[str, Any] = {"parents": parents}
    choice = rng.random()
    if choice < 0.2:
        options["mode"] = "exact"
    elif choice < 0.35 and parents:
        options["repair"] = "first:8"
    elif choice < 0.6 and parents:
        options["offsets"] = [rng.randrange(0, 200) for _ in parents]
        options["new_offset"] = rng.randrange(0, 300)
    return options


async def run(c: Any, steps: list[Step], between: Any = None) -> list[Message]:
    """Run a workflow; `between` is called before each step. Returns all messages that it made.

    An asynchronous facade is given what comes next before prefills are done.
    """
    made: list[Any] = []
    for kind, what in steps:
        if between is not None:
            between()
        if kind in ("free", "evict"):
            made = [await one if inspect.isawaitable(one) else one for one in made]
            found = getattr(c, kind)(*what)
        elif kind == "decode":
            found = c.decode(what, sampling_params=greedy())
        else:
            found = c.submit_all(what) if hasattr(c, "submit_all") else c.prefill(what)
        if inspect.isawaitable(found):
            found = await found
        made += found or []
    return [await one if inspect.isawaitable(one) else one for one in made]


def facts(messages: list[Message]) -> Iterator[tuple[Any, ...]]:
    """What must not depend on the engines."""
    for message in messages:
        yield message.id.partition("/")[2], message.token_ids, message.position, message.usage.exact
