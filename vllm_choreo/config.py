# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine side, from `LLM(..., additional_config={"choreo": {...}})`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_choreo.errors import ChoreoError

REPOSITION_POLICIES = ("query", "in_place")


@dataclass(frozen=True)
class ChoreoConfig:
    """
    Attributes:
        reposition: how a message is read at another position than that of its encoding.
            "query": keys stay as stored, the query is rotated; any number of calls read one copy
            at any positions. "in_place": its keys are rotated where they lie if no other live
            call reads them, else in a copy.
        shared_reading: whether calls of one batch that attend to the same message read its keys
            and values once for all of them, or each for itself.
    """

    reposition: str = "query"
    shared_reading: bool = True

    def __post_init__(self) -> None:
        if self.reposition not in REPOSITION_POLICIES:
            raise ChoreoError(
                f"choose one of {REPOSITION_POLICIES}",
                parameter="additional_config.choreo.reposition",
                value=self.reposition,
            )
        if not isinstance(self.shared_reading, bool):
            raise ChoreoError(
                "choose true or false",
                parameter="additional_config.choreo.shared_reading",
                value=self.shared_reading,
            )

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> ChoreoConfig:
        """Read vLLM's configuration.

        Raises:
            ChoreoError: an unknown key, or a value that is none of the choices.
        """
        additional = vllm_config.additional_config
        given = additional.get("choreo", {}) if isinstance(additional, Mapping) else {}
        names = [field.name for field in fields(cls)]
        unknown = [key for key in given if key not in names]
        if unknown:
            raise ChoreoError(
                f"unknown setting; the settings are {names}",
                parameter=f"additional_config.choreo.{unknown[0]}",
                value=given[unknown[0]],
            )
        return cls(**given)
