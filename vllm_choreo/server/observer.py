# SPDX-License-Identifier: Apache-2.0
"""Interfaces that `Sessions` uses: to count what happens, to exchange messages with servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.pair_rule import ChosenCell, PairRule
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message


class Observer(Protocol):
    """Counter of what happens in `Sessions`."""

    def opened(self) -> None:
        """Count a session that was opened."""

    def closed(self, *, expired: bool) -> None:
        """Count a session that was closed, by request or because nobody used it."""

    def finished(self, kind: str, message: Message) -> None:
        """Count a call that made a message; `kind` is "prefill" or "decode"."""

    def failed(self, kind: str, outcome: str) -> None:
        """Count a call that made no message; `outcome` is "error", or "abandoned" by its client."""

    def refused(self, error: ChoreoError) -> None:
        """Count an error with which a client was answered."""

    def chosen(self, choice: ChosenCell) -> None:
        """Count the layers that the profile of a pair has chosen for a call."""

    def looked_up(self, outcome: str, report: Mapping[str, int]) -> None:
        """Count a chat that names no messages; `outcome` is one of `AUTO_OUTCOMES`."""


class Exchanger(Protocol):
    """Exchange of messages with the server of another model; see `PairExchange`.

    Attributes:
        rule: rule of sessions that have none of their own.
    """

    rule: PairRule

    async def export(self, session: Any, result: Result) -> None:
        """Save the result of a session's call for the other server."""

    async def fetch(self, session: Any, named: Iterable[str]) -> None:
        """Load the messages that a session's call names from the other server."""
