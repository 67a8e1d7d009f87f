# SPDX-License-Identifier: Apache-2.0
"""What `Sessions` asks of others: to count what happens, to exchange messages with servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.pair_rule import ChosenCell, PairRule
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message


class Observer(Protocol):
    """Is told what happens, to count it."""

    def opened(self) -> None:
        """A session was opened."""

    def closed(self, *, expired: bool) -> None:
        """A session was closed, by request or because nobody used it."""

    def finished(self, kind: str, message: Message) -> None:
        """A call made a message; `kind` is "prefill" or "decode"."""

    def failed(self, kind: str, outcome: str) -> None:
        """A call made none: "error", or "abandoned" by its client."""

    def refused(self, error: ChoreoError) -> None:
        """A client was answered with an error."""

    def chosen(self, choice: ChosenCell) -> None:
        """The profile of a pair has chosen layers for a call."""

    def looked_up(self, outcome: str, report: Mapping[str, int]) -> None:
        """The parts of a chat were looked up; `outcome` is one of `AUTO_OUTCOMES`."""


class Exchanger(Protocol):
    """Exchanges messages with the server of another model; see `PairExchange`.

    Attributes:
        rule: of sessions that have none.
    """

    rule: PairRule

    async def export(self, session: Any, result: Result) -> None:
        """A call of the session came to this."""

    async def fetch(self, session: Any, named: Iterable[str]) -> None:
        """A call of the session names these messages."""
