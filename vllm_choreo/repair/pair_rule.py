# SPDX-License-Identifier: Apache-2.0
"""Choice of the cell of a profile that a call takes: by the allowed loss, a target, and the load.

    "pair.json"                          the cell that the profile has chosen
    {"by": "pair", "pair": "pair.json", "max_quality_loss": 0.1}
                                         the cheapest that loses no more
    {"by": "pair", "pair": "pair.json", "ttft": 0.5, "max_quality_loss": 0.3}
                                         of these the one that loses least, as long as first
                                         tokens come within half a second

More is reused when many calls wait, more is encoded anew when none do (DroidSpeak, arXiv
2411.02820, 4.4).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct, structs, to_builtins

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import Cell, PairProfile, entries, pareto
from vllm_choreo.trained_adapter import ModelIdentity

# A cell that loses less is taken again once its first token would come in this part of the target.
HYSTERESIS = 0.8
# Why a cell was taken: the profile says so; the best one is fast enough; a better one is too slow
# for the calls that wait, or for what this one reads; even this one is too slow, none is faster.
REASONS = ("profile", "best", "load", "length", "late")


class ChosenCell(NamedTuple):
    """A cell, and why it was taken: one of `REASONS`."""

    cell: Cell
    reason: str


_AtLeast0 = Annotated[float, Meta(ge=0, description="a number from 0 on is needed")]


class PairRule(
    Struct,
    frozen=True,
    tag_field="by",
    tag="pair",
    rename={"profile": "pair"},
    forbid_unknown_fields=True,
):
    """Rule by which a session's calls read another variant's messages.

    Attributes:
        profile: profile of the two variants.
        max_quality_loss: no cell that loses more is ever taken; None: the loss of the chosen one.
        ttft: seconds within which first tokens are to come; None: any.
        is_strict: whether calls with an adapter that is neither of the pair are refused, or read
            what is stored.

    Raises:
        RepairError: no cell loses so little, or the numbers are none.
    """

    advice: ClassVar[str] = (
        'a pair is read by {"pair": FILE, "max_quality_loss": SHARE, "ttft": SECONDS}'
    )
    is_strict: ClassVar[bool] = True

    profile: PairProfile
    max_quality_loss: _AtLeast0 | None = None
    ttft: _AtLeast0 | None = None

    def __post_init__(self) -> None:
        if not self.allowed:
            least = min(cell.quality_loss for cell in self.profile.cells)
            raise RepairError(
                f"no choice of layers loses so little: of the profile's the best one loses {least}",
                parameter="repair.max_quality_loss",
                value=self.max_quality_loss,
            )

    @property
    def allowed(self) -> list[Cell]:
        """Cells that may be taken: of more layers from each to the next, and of less loss."""
        if self.ttft is None and self.max_quality_loss is None:
            return [self.profile.chosen_cell]
        most = self.max_quality_loss
        if most is None:
            most = self.profile.chosen_cell.quality_loss
        allowed = [cell for cell in self.profile.cells if cell.quality_loss <= most]
        best = pareto(allowed)
        return best if self.ttft is not None else best[:1]

    @property
    def keep_hidden(self) -> tuple[int, ...]:
        """Layers whose hidden states messages keep, whatever is taken."""
        return entries(self.allowed)

    def check_model(self, served: ModelIdentity) -> None:
        """Raise RepairError unless the model is the profile's, or as a whole the writer."""
        if not self.is_written_by(served):
            self.profile.check_model(served)

    def is_written_by(self, served: ModelIdentity) -> bool:
        """Return whether a model is, as a whole, the writer."""
        return bool(served.weights) and served.weights == self.profile.writer

    def is_read_by(self, weights: str | None) -> bool:
        """Return whether a call is the reader's, and not the writer's.

        Args:
            weights: digest of the call's adapter; None: it uses none; "": not known.

        Raises:
            RepairError: it is that of neither.
        """
        if weights in (self.profile.reader, ""):
            return True
        if weights != self.profile.writer and self.is_strict:
            raise RepairError(
                "the call uses an adapter that is neither of the pair: name that of the reader, "
                'profile the two that are used, or say repair="none"',
                parameter="repair",
                value=weights,
            )
        return False

    def to_json(self) -> dict[str, Any]:
        """Rule as a session gives it, with only the cells that may be taken, and the chosen one."""
        cells = self.allowed
        if self.profile.chosen is not None and self.profile.chosen_cell not in cells:
            cells = [*cells, self.profile.chosen_cell]
        profile = structs.replace(self.profile, cells=tuple(cells), measured={})
        data: dict[str, Any] = to_builtins(structs.replace(self, profile=profile))
        return data


class LenientPairRule(PairRule, frozen=True):
    """Rule by which calls with an adapter that is neither of the pair read what is stored."""

    is_strict: ClassVar[bool] = False


class PairChooser:
    """Chooser of a cell for each call; a change for the better waits until it is sure to last.

    Args:
        rule: the session's rule.

    Attributes:
        counts: how often each cell was taken, by its name and the reason.
    """

    def __init__(self, rule: PairRule) -> None:
        self.rule = rule
        self.counts: dict[str, dict[str, int]] = {}
        self._cells = rule.allowed
        self._last = len(self._cells) - 1

    def choose(self, num_read: int, num_before: int) -> ChosenCell:
        """Choose the cell for a call.

        Args:
            num_read: tokens that it reads.
            num_before: calls that the engine has not finished.
        """
        choice = self._choice(num_read, num_before)
        of_cell = self.counts.setdefault(choice.cell.name, {})
        of_cell[choice.reason] = of_cell.get(choice.reason, 0) + 1
        return choice

    def _choice(self, num_read: int, num_before: int) -> ChosenCell:
        if self.rule.ttft is None:
            return ChosenCell(self._cells[0], "profile")
        self._last = self._number(num_read, num_before)
        cell = self._cells[self._last]
        if self.seconds(cell, num_read, num_before) > self.rule.ttft:
            return ChosenCell(cell, "late")
        if self._last == len(self._cells) - 1:
            return ChosenCell(cell, "best")
        better = self._cells[self._last + 1]
        is_long = self.seconds(better, num_read, 0) > HYSTERESIS * self.rule.ttft
        return ChosenCell(cell, "length" if is_long else "load")

    def _number(self, num_read: int, num_before: int) -> int:
        """Number of the best cell that is fast enough; amply so, if better than the last."""
        assert self.rule.ttft is not None
        for number in range(len(self._cells) - 1, 0, -1):
            part = HYSTERESIS if number > self._last else 1.0
            seconds = self.seconds(self._cells[number], num_read, num_before)
            if seconds <= part * self.rule.ttft:
                return number
        return 0

    def seconds(self, cell: Cell, num_read: int, num_before: int) -> float:
        """Seconds to the first token by the profile, if calls before cost as much as this one."""
        return cell.ttft * num_read / self.rule.profile.num_read * (1 + num_before)
