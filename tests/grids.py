# SPDX-License-Identifier: Apache-2.0
"""Long grids: a part in every run, thrice that with `make test ALL=1`, all with `NIGHTLY=1`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], keep: int, most: int | None = None) -> list[Any]:
    """`cases`: the first `keep` run always, some behind them are exhaustive, the rest nightly.

    Args:
        most: how many are not nightly; None: three times `keep`.
    """
    listed = list(cases)
    most = 3 * keep if most is None else most
    rest = (pytest.param(case, marks=pytest.mark.exhaustive) for case in listed[keep:most])
    last = (pytest.param(case, marks=pytest.mark.nightly) for case in listed[most:])
    return [*listed[:keep], *rest, *last]
