# SPDX-License-Identifier: Apache-2.0
"""`PromptAnswer`: the message that a prompt made, and where its tokens came from."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_choreo.pml.language.placing import PromptUsage
from vllm_choreo.semantics.message import Message


@dataclass(frozen=True)
class PromptAnswer:
    """Result of a prompt.

    Attributes:
        message: the prompt's last new text and what was generated; its parents are the modules.
        usage: where the prompt's tokens came from.
    """

    message: Message
    usage: PromptUsage

    @property
    def text(self) -> str:
        """Generated text."""
        return self.message.generated_text
