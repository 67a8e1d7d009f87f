# SPDX-License-Identifier: Apache-2.0
"""Processes of the sides that are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.harness.child import Child
from benchmarks.states import engine


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
