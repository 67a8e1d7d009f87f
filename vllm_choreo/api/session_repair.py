# SPDX-License-Identifier: Apache-2.0
"""Repair of calls that name no rule: by the rule, policy or profiles of their session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.api.adapters import adapter_weights_of, base_model
from vllm_choreo.api.entries import Entries
from vllm_choreo.api.pair_rules import PairRules, PairsChooser
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.layers import entries_of
from vllm_choreo.repair.pair_rule import ChosenCell, PairChooser, PairRule
from vllm_choreo.repair.policy import Policy
from vllm_choreo.repair.rules import ByLayers, Rule
from vllm_choreo.repair.session_rules import SessionRule, session_rule
from vllm_choreo.semantics.call import BY_PAIR, CallSpec
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.session_options import SessionOptions

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class SessionRepair:
    """The rule of a session.

    Args:
        options: the session's: its rule, policy, profile or folder of profiles, as `Choreography`
            takes `repair`, and the function that is told what profiles choose for each call.
        model: name of the engine's model in its configuration.
        entries: the messages of the session.
        num_unfinished: function that counts the engine's unfinished requests.

    Attributes:
        rule: the parsed rule, policy or profiles; None: there is none.
        keep_hidden: layers whose hidden states are kept for calls that do not say it.

    Raises:
        RepairError: no rule, or one that was found with another model.
    """

    def __init__(
        self,
        options: SessionOptions,
        model: str,
        entries: Entries,
        num_unfinished: Callable[[], int],
    ) -> None:
        self.rule = _rule_given(options)
        self._base = base_model(model)
        self._is_text = options.mode == "baseline"
        self._entries = entries
        self._num_unfinished = num_unfinished
        self._on_choice = options.on_choice
        self._chooser: PairChooser | PairsChooser | None = None
        self.keep_hidden: tuple[int, ...] = ()
        self._is_writer = False
        if isinstance(self.rule, (Policy, PairRule, PairRules)):
            self.rule.check_model(self._base)
        if isinstance(self.rule, ByLayers):
            self.keep_hidden = entries_of(self.rule.ranges)
        if isinstance(self.rule, (PairRule, PairRules)):
            self.keep_hidden = self.rule.keep_hidden
        if isinstance(self.rule, PairRule):
            self._chooser = PairChooser(self.rule)
            self._is_writer = self.rule.is_written_by(self._base)
        if isinstance(self.rule, PairRules):
            self._chooser = PairsChooser(self.rule)

    @property
    def follows_load(self) -> bool:
        """True if what calls repair depends on the engine's load."""
        if isinstance(self.rule, PairRule):
            return self.rule.ttft is not None
        return isinstance(self.rule, PairRules) and self.rule.follows_load

    @property
    def asks_for_writers(self) -> bool:
        """True if what calls repair depends on who has written what they read."""
        return isinstance(self.rule, PairRules)

    def note_writers(self, calls: Sequence[PlannedCall]) -> None:
        """Note by which adapters messages are written, where a profile may ask for it."""
        if self.asks_for_writers:
            for call in calls:
                if (weights := adapter_weights_of(call.adapter)) is not None:
                    self._entries.set_writer(call.id, weights)

    @property
    def choices(self) -> Mapping[str, Mapping[str, int]] | None:
        """Counts of the layers chosen, by the reason; None: nothing is chosen here."""
        return None if self._chooser is None else self._chooser.counts

    def of(
        self,
        spec: CallSpec,
        exact: bool,
        parents: Sequence[ParentSpan],
        adapter: LoRARequest | None,
        num_planned: int,
    ) -> object:
        """Return the call's own rule, or the one that the session has for it.

        Args:
            exact: True for an exact call, which encodes anew what it must and has no other repair.
            parents: the call's parents, by the ids of messages.
            adapter: the `LoRARequest` that the call uses, or None.
            num_planned: calls of the same list before it.

        Raises:
            RepairError: the session's policy does not know the roles, or its profile the adapter.
        """
        by_pair = spec.repair == BY_PAIR
        if by_pair and not isinstance(self.rule, (PairRule, PairRules)):
            raise RepairError(
                "which layers a variant encodes anew, the profile of a pair says: open the session "
                'with repair="pair.json", or name the layers',
                parameter="layers",
                value=BY_PAIR,
            )
        if exact or (spec.repair is not None and not by_pair):
            return None if by_pair else spec.repair
        if not isinstance(self.rule, (Policy, PairRule, PairRules)):
            return self.rule
        if not parents or self._is_text or self._is_writer:
            return None
        entries = [self._entries.get("parents", span.id) for span in parents]
        if isinstance(self.rule, Policy):
            return self.rule.rule(spec.role, [entry.role for entry in entries])
        weights = adapter_weights_of(adapter)
        if isinstance(self.rule, PairRule) and not self.rule.is_read_by(weights):
            return None
        # How long a parent will be that is still generated nobody knows: it counts for nothing.
        num_read = sum(
            len(range(entry.num_tokens)[span.start : span.stop])
            for entry, span in zip(entries, parents, strict=True)
            if isinstance(entry, Message)
        )
        num_before = self._num_unfinished() + num_planned
        return self._told(self._choice(parents, weights, num_read, num_before))

    def _choice(
        self, parents: Sequence[ParentSpan], weights: str | None, num_read: int, num_before: int
    ) -> ChosenCell | None:
        """Choose layers; None: the call reads what is stored."""
        if isinstance(self._chooser, PairChooser):
            return self._chooser.choose(num_read, num_before)
        assert self._chooser is not None
        base = self._base.weights
        writers = {self._entries.writer(span.id) or base for span in parents}
        reader = base if weights is None else weights
        return self._chooser.choose(reader, writers, num_read, num_before)

    def _told(self, choice: ChosenCell | None) -> Rule | None:
        if choice is None:
            return None
        if self._on_choice is not None:
            self._on_choice(choice)
        return choice.cell.rule


def _rule_given(options: SessionOptions) -> SessionRule | PairRules | None:
    """Rule of a session; several profiles are a folder, or come from the server's own."""
    given = options.repair
    # What a client sends is a text, and no path: a server opens nothing for it.
    rules = PairRules.in_folder(given) if isinstance(given, Path) and given.is_dir() else given
    if not isinstance(rules, PairRules):
        return session_rule(rules, options.mode)
    session_rule("none", options.mode)  # refuses sessions whose calls are all exact
    return rules
