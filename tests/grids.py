# SPDX-License-Identifier: Apache-2.0
"""Long grids: a part of them in every run, more with `make test ALL=1`, all with `NIGHTLY=1`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], keep: int, most: int | None = None) -> list[Any]:
    """`cases`, of which all but the first `keep` are marked exhaustive.

    Args:
        most: of how many that is enough where something has changed; those behind them are
            marked nightly. None: of all.
    """
    listed = list(cases)
    most = len(listed) if most is None else most
    rest = (pytest.param(case, marks=pytest.mark.exhaustive) for case in listed[keep:most])
    last = (pytest.param(case, marks=pytest.mark.nightly) for case in listed[most:])
    return [*listed[:keep], *rest, *last]
