# SPDX-License-Identifier: Apache-2.0
"""Values of `repair=` of a session: a rule, a policy, or the profile of a pair; also as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import PairProfile
from vllm_choreo.repair.pair_rule import PairRule
from vllm_choreo.repair.policy import Policy, read_json
from vllm_choreo.repair.rules import ByAttention, ByLayers, GivenRuns, Rule, rule_of

SUFFIX = ".json"

SessionRule = Rule | Policy | PairRule


def session_rule(given: Any, mode: str) -> SessionRule | None:
    """Rule by which a session's calls repair, or None.

    Raises:
        RepairError: no rule, runs, which are those of one call, or a session whose calls are all
            exact.
    """
    if given is None:
        return None
    rule = _rule_given(given)
    if isinstance(rule, GivenRuns):
        raise RepairError(
            'runs belong to one call; a session has a rule, such as "first:32"',
            parameter="repair",
            value=given,
        )
    if mode == "exact":
        raise RepairError(
            "mode 'exact' encodes anew whatever it must: leave repair out, or choose the mode "
            "'choreo'",
            parameter="repair",
            value=given,
        )
    return rule


def runs_some_layers(given: Any) -> bool:
    """Return whether a session's rule has the engine run some layers alone, which takes memory.

    Raises:
        RepairError: it is no rule.
    """
    return isinstance(session_rule(given, "choreo"), (ByAttention, ByLayers, PairRule))


def names_file(given: Any) -> bool:
    """Return whether a rule is in a file, or a part of it."""
    if isinstance(given, Mapping):
        return names_file(given.get("pair"))
    return isinstance(given, Path) or (isinstance(given, str) and given.endswith(SUFFIX))


def check_sent(given: Any) -> None:
    """Raise RepairError if a client names a file: a server opens none for its clients."""
    if names_file(given):
        raise RepairError(
            "a server opens no file for its clients: send what it holds, as ChoreoClient does, or "
            'a rule such as "first:32"',
            parameter="repair",
            value=given,
        )


def _rule_given(given: Any) -> SessionRule:
    if isinstance(given, (Policy, PairRule)):
        return given
    if isinstance(given, PairProfile):
        return PairRule(given)
    if isinstance(given, Mapping):
        return _of_object(given)
    if not names_file(given):
        return rule_of(given)
    data = read_json(given)
    is_pair = isinstance(data, Mapping) and "cells" in data
    return _of_object(data) if is_pair else Policy.from_json(data)


def _of_object(given: Mapping[str, Any]) -> SessionRule:
    if "pair" in given:
        profile = given["pair"]
        return PairRule.from_json(
            {**given, "pair": read_json(profile) if names_file(profile) else profile}
        )
    if "cells" in given:
        return PairRule(PairProfile.from_json(given))
    return Policy.from_json(given) if "masks" in given else rule_of(given)
