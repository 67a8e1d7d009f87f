# SPDX-License-Identifier: Apache-2.0
"""Reading of messages of several other models, or adapters: a profile for each pair.

    pairs/              a folder of profiles, as of `vllm-choreo profile-pair`
      a-to-b.json       by which B reads what A has written
      c-to-b.json       and what C has written
      b-to-a.json       and A what B has

A call reads a message by the profile of who has written it and who makes the call. What the call's
own model has written, and what no profile is of, is read as it is stored. Layers are those of a
call: if its messages have several writers, it encodes anew what any of their profiles says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import PairProfile
from vllm_choreo.repair.pair_rule import ChosenCell, LenientPairRule, PairChooser, PairRule
from vllm_choreo.repair.runs import merge_ranges
from vllm_choreo.repair.session_rules import SUFFIX, session_rule
from vllm_choreo.trained_adapter import ModelIdentity


class PairNames(NamedTuple):
    """Digests of the weights of two variants: of models, or of adapters."""

    writer: str
    reader: str

    @classmethod
    def of(cls, profile: PairProfile) -> PairNames:
        """Names of the pair of a profile, which names a base that is one of them by `model`."""
        base = profile.model.weights
        return cls(profile.writer or base, profile.reader or base)


class PairRules:
    """Rules by which a session's calls read other variants' messages: one for each pair.

    Args:
        rules: rules, in any order.

    Attributes:
        by_pair: the rules by the two of each.

    Raises:
        RepairError: there is none, two are of one pair, or one is of unknown weights.
    """

    def __init__(self, rules: Iterable[PairRule]) -> None:
        self.by_pair: dict[PairNames, PairRule] = {}
        for rule in rules:
            names = PairNames.of(rule.profile)
            if "" in names:
                raise RepairError(
                    "the profile is of a model whose weights are not known: profile models that "
                    "lie in folders",
                    parameter="repair",
                    value=rule.profile.model.name,
                )
            if names in self.by_pair:
                raise RepairError(
                    "two profiles are of the same writer and reader: leave one",
                    parameter="repair",
                    value=rule.profile.model.name,
                )
            self.by_pair[names] = rule
        if not self.by_pair:
            raise RepairError(
                f"the folder holds no profile of a pair: put files *{SUFFIX} of vllm-choreo "
                "profile-pair into it",
                parameter="repair",
                value="",
            )

    @classmethod
    def in_folder(cls, folder: Path) -> PairRules:
        """Read the profiles of a folder; each is read by the cell that it has chosen.

        Raises:
            RepairError: a file is no profile, or as `PairRules`.
        """
        rules = []
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            rule = session_rule({"pair": str(path)}, "choreo")
            assert isinstance(rule, PairRule), "that is its form"
            rules.append(LenientPairRule(rule.profile))
        return cls(rules)

    @property
    def keep_hidden(self) -> tuple[int, ...]:
        """Layers whose hidden states all messages keep, whoever reads them, beside any others."""
        kept = (layer for rule in self.by_pair.values() for layer in rule.keep_hidden)
        return tuple(sorted(set(kept)))

    @property
    def follows_load(self) -> bool:
        """True if what calls repair depends on the engine's load."""
        return any(rule.ttft is not None for rule in self.by_pair.values())

    def is_written_by(self, model: ModelIdentity) -> bool:
        """Return whether another model reads, by one of the profiles, what this one has written."""
        return any(rule.is_written_by(model) for rule in self.by_pair.values())

    def is_read_by(self, model: ModelIdentity) -> bool:
        """Return whether this model, or an adapter of it, reads by one of the profiles."""
        return any(rule.profile.model.same_as(model) for rule in self.by_pair.values())

    def check_model(self, model: ModelIdentity) -> None:
        """Raise RepairError if no profile is of this model."""
        if not (self.is_read_by(model) or self.is_written_by(model)):
            names = ", ".join(sorted({rule.profile.model.name for rule in self.by_pair.values()}))
            raise RepairError(
                f"none of the profiles, of {names}, is of the model that is served, {model.name}: "
                "profile it, too",
                parameter="repair",
                value=model.name,
            )

    def to_json(self) -> dict[str, Any]:
        """Rules as plain data: that of a single one is its own."""
        found = [rule.to_json() for rule in self.by_pair.values()]
        return found[0] if len(found) == 1 else {"by": "pairs", "pairs": found}

    def __str__(self) -> str:
        return str(list(self.by_pair.values()))


class PairsChooser:
    """Chooser of the layers that a call encodes anew of the messages that it reads.

    Args:
        rules: rules of the session.
    """

    def __init__(self, rules: PairRules) -> None:
        self._choosers = {names: PairChooser(rule) for names, rule in rules.by_pair.items()}

    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """How often each cell was taken, by its name and the reason, in all pairs together."""
        total: dict[str, dict[str, int]] = {}
        for chooser in self._choosers.values():
            for name, reasons in chooser.counts.items():
                of_cell = total.setdefault(name, {})
                for reason, count in reasons.items():
                    of_cell[reason] = of_cell.get(reason, 0) + count
        return total

    def choose(
        self, reader: str, writers: Iterable[str], num_read: int, num_before: int
    ) -> ChosenCell | None:
        """Choose the layers for a call; None: it reads what is stored.

        Args:
            reader: weights of the call's model, or adapter.
            writers: weights of those who have written what it reads.
            num_read: tokens that it reads.
            num_before: calls that the engine has not finished.
        """
        pairs = {PairNames(writer, reader) for writer in writers if writer != reader}
        found = [self._choosers[names] for names in sorted(pairs) if names in self._choosers]
        chosen = [chooser.choose(num_read, num_before) for chooser in found]
        return _together(chosen) if chosen else None


def _together(chosen: Sequence[ChosenCell]) -> ChosenCell:
    """One choice for all: the layers of each; the rest is that of the one that loses most."""
    worst = max(chosen, key=lambda choice: choice.cell.quality_loss)
    layers = merge_ranges(one for choice in chosen for one in choice.cell.layers)
    return ChosenCell(structs.replace(worst.cell, layers=layers), worst.reason)
