# SPDX-License-Identifier: Apache-2.0
"""`--target NAME=VALUE`: what a study is to reach, and the choice of the arm that does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from vllm_choreo.errors import RepairError

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class MeasureTarget:
    """A bound of a measure: at least `value` of an agreement, at most of all else.

    Attributes:
        name: name of the measure; an arm has it as an attribute, `loss` as `quality_loss`.
        value: the bound, in the measure's unit.
    """

    name: str
    value: float

    @classmethod
    def given(cls, text: str, forms: Sequence[str]) -> MeasureTarget:
        """Read an argument.

        Args:
            forms: forms that it may have, "kl=NATS per token" for example; an `agreement` is at
                most 1.

        Raises:
            RepairError: no such target, or no number from 0 on behind it.
        """
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        names = [form.partition("=")[0] for form in forms]
        if name not in names or not value >= 0 or (name == "agreement" and value > 1):
            says = f"{', '.join(forms[:-1])}, or {forms[-1]}"
            raise RepairError(f"a target is {says}", parameter="target", value=text)
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}"

    def choose(self, arms: Iterable[Measured], cost: str, distance: str) -> Measured | None:
        """Choose the cheapest arm that is near enough, or the nearest that is fast enough.

        Args:
            arms: arms as they were measured.
            cost, distance: names of the attributes of which less is better.

        Returns:
            The arm; None if none reaches the target.
        """
        fit = [arm for arm in arms if self._is_reached(arm)]
        return min(fit, key=attrgetter(distance if self.name == "ttft" else cost), default=None)

    def _is_reached(self, arm: object) -> bool:
        measured: float = getattr(arm, "quality_loss" if self.name == "loss" else self.name)
        return measured >= self.value if self.name == "agreement" else measured <= self.value
