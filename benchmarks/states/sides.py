# SPDX-License-Identifier: Apache-2.0
"""Processes of the sides that are compared, and the texts that they are given."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.harness.child import Child
from benchmarks.states import engine

Tokens = list[int]


def draw_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    """Draw token ids of a text, none of them special."""
    return [rng.randrange(10, 500) for _ in range(num_tokens)]


@contextlib.contextmanager
def open_sides(model: Path, sides: Mapping[str, str]) -> Iterator[dict[str, Child]]:
    """Have all sides up at once; `sides` are those of `engine`."""
    with contextlib.ExitStack() as stack:
        yield {
            side: stack.enter_context(
                Child.of(engine.__name__, side, str(model), VLLM_PLUGINS=plugins)
            )
            for side, plugins in sides.items()
        }
