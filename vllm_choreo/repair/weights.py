# SPDX-License-Identifier: Apache-2.0
"""Other weights of attention to parents that were encoded apart. Neither torch nor vllm."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

# Beyond these, scores leave what float32 holds; what rules look for lies near 1.
_Factor = Annotated[float, Meta(ge=0.1, le=10.0)]
ADVICE = "a temperature and a scale of the log-sum-exp are needed, both from 0.1 to 10: [0.9, 1.0]"


class Weights(NamedTuple):
    """Weights of a call's attention to all parents but the first (APE, arXiv 2502.05431, 3).

    Attributes:
        temperature: temperature of the scores of their tokens.
        scale: factor of the log-sum-exp of all of these, beside the temperature.
    """

    temperature: _Factor
    scale: _Factor

    @property
    def factor(self) -> float:
        """Factor of that log-sum-exp, before it is merged with the rest."""
        return self.temperature * self.scale
