# SPDX-License-Identifier: Apache-2.0
"""Runs of tokens: `(start, stop)` stands for tokens `start … stop-1`. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from vllm_choreo.errors import RepairError

TokenRange = tuple[int, int]
TokenRanges = tuple[TokenRange, ...]


def checked_runs(given: Any) -> tuple[TokenRanges, ...]:
    """Runs of each parent, as a call gives them; sorted, and those that touch joined.

    Raises:
        RepairError: no list of lists of pairs, or runs that are empty, negative or overlap.
    """
    return tuple(_of_parent(runs) for runs in _listed(given))


def check_inside(runs: Sequence[TokenRanges], lengths: Sequence[int]) -> None:
    """Check that no run ends behind its parent.

    Args:
        runs: runs of each parent.
        lengths: number of tokens that the call sees of each parent.

    Raises:
        RepairError: a run ends behind its parent.
    """
    for of_parent, length in zip(runs, lengths, strict=True):
        if of_parent and of_parent[-1][1] > length:
            raise RepairError(
                f"a run ends behind the {length} tokens that the call sees of this parent; "
                "indices count from the first of them",
                parameter="repair",
                value=list(of_parent[-1]),
            )


def joined(runs: Iterable[TokenRange]) -> TokenRanges:
    """Same tokens in ascending runs that do not touch; empty ones are left out."""
    found: list[TokenRange] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def num_tokens(runs: Iterable[TokenRange]) -> int:
    """Number of tokens in all runs of one parent."""
    return sum(stop - start for start, stop in runs)


def as_lists(runs: Iterable[TokenRanges]) -> list[list[list[int]]]:
    """Runs as lists, as JSON has them."""
    return [[list(run) for run in of_parent] for of_parent in runs]


def _of_parent(given: Any) -> TokenRanges:
    runs = [_run(run) for run in _listed(given)]
    ends = sorted(runs)
    for (_, stop), (start, _) in pairwise(ends):
        if start < stop:
            raise RepairError("runs of one parent overlap", parameter="repair", value=given)
    return joined(runs)


def _run(given: Any) -> TokenRange:
    pair = tuple(_listed(given))
    if len(pair) != 2 or any(type(end) is not int for end in pair) or not 0 <= pair[0] < pair[1]:
        raise RepairError(
            "a run is (start, stop) with 0 <= start < stop, in tokens of its parent",
            parameter="repair",
            value=given,
        )
    return pair[0], pair[1]


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise RepairError(
            "runs are given as one list per parent: [[(start, stop), ...], ...]",
            parameter="repair",
            value=given,
        )
    return given
