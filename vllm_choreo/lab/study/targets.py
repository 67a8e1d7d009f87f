# SPDX-License-Identifier: Apache-2.0
"""`--target NAME=VALUE`: what a calibration or a profile is to reach."""

from __future__ import annotations

from collections.abc import Container

from vllm_choreo.errors import RepairError


def target_given(text: str, names: Container[str], says: str) -> tuple[str, float]:
    """A target as an argument gives it.

    Args:
        names: names that it may have; an `agreement` is at most 1.
        says: text that lists the names, for the error.

    Raises:
        RepairError: no such target, or no number from 0 on behind it.
    """
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if name not in names or not value >= 0 or (name == "agreement" and value > 1):
        raise RepairError(f"a target is {says}", parameter="target", value=text)
    return name, value
