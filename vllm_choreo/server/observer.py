# SPDX-License-Identifier: Apache-2.0
"""What is told whoever counts what happens on a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.pair_rule import ChosenCell
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
