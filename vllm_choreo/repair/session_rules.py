# SPDX-License-Identifier: Apache-2.0
"""Values of `repair=` of a session: a rule, a policy, or the profile of a pair; also as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from vllm_choreo.convert import convert
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.measured_file import read_json
from vllm_choreo.repair.pair import PairProfile
from vllm_choreo.repair.pair_rule import PairRule
from vllm_choreo.repair.policy import Policy
from vllm_choreo.repair.rules import RULES, ByAttention, ByLayers, CallRule, GivenRuns
from vllm_choreo.repair.short_forms import tagged

SUFFIX = ".json"

SessionRule = CallRule | Policy | PairRule


def session_rule(given: object, mode: str) -> SessionRule | None:
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


def runs_some_layers(given: object) -> bool:
    """Return whether a session's rule has the engine run some layers alone, which takes memory.

    Raises:
        RepairError: it is no rule.
    """
    return isinstance(session_rule(given, "choreo"), (ByAttention, ByLayers, PairRule))


def names_file(given: object) -> bool:
    """Return whether a rule is in a file, or a part of it."""
    if isinstance(given, Mapping):
        return names_file(given.get("pair"))
    return isinstance(given, Path) or (isinstance(given, str) and given.endswith(SUFFIX))


def check_sent(given: object) -> None:
    """Raise RepairError if a client names a file: a server opens none for its clients."""
    if names_file(given):
        raise RepairError(
            "a server opens no file for its clients: send what it holds, as ChoreoClient does, or "
            'a rule such as "first:32"',
            parameter="repair",
            value=given,
        )


def _rule_given(given: object) -> SessionRule:
    if isinstance(given, PairProfile):
        return PairRule(given)
    if isinstance(given, PairRule):  # lenient ones are none of the forms
        return given
    data = tagged(_with_files(given))
    form = Annotated[SessionRule, Meta(description=RULES)]
    rule: SessionRule = convert(data, form, "repair", RepairError)
    return rule


def _with_files(given: object) -> object:
    """Return a rule with what the file holds that it names."""
    if not names_file(given):
        return given
    if isinstance(given, Mapping):
        return {**given, "pair": _with_files(given["pair"])}
    assert isinstance(given, (str, Path)), "it names a file"
    return read_json(given)
