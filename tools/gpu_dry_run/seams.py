# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CUDA-only code that a dry run met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

# How often each was met, by its name.
SEAMS: Counter[str] = Counter()


def noted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which notes in `SEAMS` that it was met."""

    def note(*args: Any, **kwargs: Any) -> Any:
        SEAMS[name] += 1
        return operation(*args, **kwargs)

    return note
