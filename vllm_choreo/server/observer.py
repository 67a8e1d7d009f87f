# SPDX-License-Identifier: Apache-2.0
"""Interface of what counts the things that happen in `Sessions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.pair_rule import ChosenCell
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
