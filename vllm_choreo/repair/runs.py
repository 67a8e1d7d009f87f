# SPDX-License-Identifier: Apache-2.0
"""Runs of tokens: `(start, stop)` stands for tokens `start … stop-1`. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from vllm_choreo.errors import RepairError

TokenRange = tuple[int, int]
TokenRanges = tuple[TokenRange, ...]


def checked_runs(given: Sequence[TokenRanges]) -> tuple[TokenRanges, ...]:
    """Runs of each parent, sorted, and those that touch merged.

    Raises:
        RepairError: runs that are empty, negative or overlap.
    """
    for of_parent in given:
        for start, stop in of_parent:
            if not 0 <= start < stop:
                raise RepairError(
                    "a run is (start, stop) with 0 <= start < stop, in tokens of its parent",
                    parameter="repair",
                    value=(start, stop),
                )
        if any(start < stop for (_, stop), (start, _) in pairwise(sorted(of_parent))):
            raise RepairError("runs of one parent overlap", parameter="repair", value=of_parent)
    return tuple(map(merge_ranges, given))


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


def merge_ranges(runs: Iterable[TokenRange]) -> TokenRanges:
    """Merge runs: the same tokens in ascending ones that do not touch; empty ones are left out."""
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
