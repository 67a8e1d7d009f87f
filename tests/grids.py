# SPDX-License-Identifier: Apache-2.0
"""Long grids: a part of them in every run, all of them with `make test ALL=1`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], keep: int) -> list[Any]:
    """`cases`, of which all but the first `keep` are marked exhaustive."""
    listed = list(cases)
    rest = (pytest.param(case, marks=pytest.mark.exhaustive) for case in listed[keep:])
    return [*listed[:keep], *rest]
