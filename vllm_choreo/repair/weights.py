# SPDX-License-Identifier: Apache-2.0
"""Other weights of attention to parents that were encoded apart. Neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_choreo.errors import RepairError

# Beyond these, scores leave what float32 holds; what rules look for lies near 1.
_MIN, _MAX = 0.1, 10.0


class Weights(NamedTuple):
    """Weights of a call's attention to all parents but the first (APE, arXiv 2502.05431, 3).

    Attributes:
        temperature: temperature of the scores of their tokens.
        scale: factor of the log-sum-exp of all of these, beside the temperature.
    """

    temperature: float
    scale: float

    @property
    def factor(self) -> float:
        """Factor of that log-sum-exp, before it is merged with the rest."""
        return self.temperature * self.scale


def checked_weights(given: Any) -> Weights:
    """Weights that a call gives, checked.

    Raises:
        RepairError: it is no temperature and scale, or one that is out of bounds.
    """
    is_pair = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    if not is_pair or not all(type(x) in (int, float) and _MIN <= x <= _MAX for x in given):
        raise RepairError(
            "a temperature and a scale of the log-sum-exp are needed, both from "
            f"{_MIN:g} to {_MAX:g}: [0.9, 1.0]",
            parameter="repair.reweight",
            value=given,
        )
    return Weights(*map(float, given))
