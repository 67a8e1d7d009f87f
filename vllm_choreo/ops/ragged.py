# SPDX-License-Identifier: Apache-2.0
"""Runs of various lengths, one behind the other in an array, as plans have them in host memory.

lengths      2     0     3            of the runs
bounds       0     2     2     5      where each begins, and where the last one ends
entries      a b         c d e
run          0 0         2 2 2        of each entry
index        0 1         0 1 2        of each entry, in its run
"""

from __future__ import annotations

import numpy as np


def bounds_of(lengths: np.ndarray) -> np.ndarray:
    """Bounds of runs of these lengths: int64 ``[num_runs + 1]``."""
    bounds: np.ndarray = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def entries_of(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run, and index in its run, of each entry: int64 ``[num_entries]`` both."""
    run: np.ndarray = np.repeat(np.arange(len(lengths)), lengths)
    return run, np.arange(len(run)) - bounds_of(lengths)[run]


def any_of(found: np.ndarray, run: np.ndarray, num_runs: int) -> np.ndarray:
    """Return of each run whether an entry is found: bool ``[num_runs]``.

    Args:
        found: bool ``[num_entries]``.
        run: run of each entry.
    """
    has_any: np.ndarray = np.zeros(num_runs, dtype=bool)
    has_any[run[found]] = True
    return has_any
