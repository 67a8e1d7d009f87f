# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a model's own, which its tokenizer runs, and one of an opening and a closing.

vLLM's renderer runs a model's template for chats that are answered; this is for what has a
tokenizer alone: schemas of prompts, and recorded chats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_choreo.errors import ChoreoError


class TemplatedTokenizer(Protocol):
    """Tokenizer of transformers, or another object with its method."""

    def apply_chat_template(
        self,
        conversation: list[Mapping[str, object]],
        /,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: object,
    ) -> object:
        """Render a chat; not tokenized, as text."""


def render_chat(
    tokenizer: TemplatedTokenizer,
    chat: Sequence[Mapping[str, object]],
    ends: bool,
    refusal: Callable[[Exception], ChoreoError],
    **options: object,
) -> str:
    """Render a chat as text.

    Args:
        tokenizer: runs its own template, or `chat_template` of the options.
        chat: messages in the form of the OpenAI API.
        ends: whether the model's turn begins at the end.
        refusal: makes the error of a chat that the template refuses from what the template raised.
        options: variables of the template.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=ends, **options
        )
        return str(rendered)
    except Exception as error:  # whatever a template raises, which is a program
        raise refusal(error) from error


@dataclass(frozen=True)
class TurnTemplate:
    """Text around each turn of a chat; by default ChatML's (SmolLM2, Qwen and others).

    `<|im_start|>` and `<|im_end|>` are single tokens, so turns have the same tokens apart as
    together.

    Attributes:
        opening: text before a turn; `{role}` is its role.
        closing: text behind a turn.
    """

    opening: str = "<|im_start|>{role}\n"
    closing: str = "<|im_end|>\n"

    def begin(self, role: str) -> str:
        """Opening of a turn of this role."""
        return self.opening.format(role=role)

    def turn(self, role: str, text: str) -> str:
        """Whole turn."""
        return f"{self.begin(role)}{text}{self.closing}"
