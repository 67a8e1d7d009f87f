# SPDX-License-Identifier: Apache-2.0
"""A parallel list of calls whose callers have nothing to do with one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError


def results_of(
    make: Callable[[list[Any]], Sequence[Any]],
    calls: Sequence[Any],
    errors: type[Exception] = ChoreoError,
) -> Sequence[Any]:
    """Results of calls: the message of each, or the error with which it failed.

    Args:
        make: `decode`, `prefill` or the like of a facade: takes a list, returns one.
        calls: its items, in order.
        errors: class of the errors that one call may end with; all others are raised.

    Returns:
        One entry per call, in order.
    """
    try:
        return make(list(calls))
    except errors as error:
        if found := getattr(error, "results", None):
            return list(found)
        if len(calls) == 1:
            return [error]
    # One of them is refused, so none was run: each by itself, for the sake of the others.
    return [results_of(make, [call], errors)[0] for call in calls]
