# SPDX-License-Identifier: Apache-2.0
"""Roles of agents that read one another, each behind a system prompt of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.lab.workflows.sampling import Sampling
from vllm_choreo.semantics.message import Message


class AgentRole(NamedTuple):
    """A role: its system prompt, the role of what it says, what it is asked, how it begins."""

    system: str
    says: str
    asked: str
    opening: str

    def say(
        self, c: Facade, chat: ChatTurns, parents: Sequence[Message], sampling_params: Sampling
    ) -> Message:
        """Have the role say something to all that it reads."""
        return c.decode(
            chat.user(self.asked) + chat.assistant(self.opening),
            parents=parents,
            role=self.says,
            sampling_params=sampling_params,
        )
