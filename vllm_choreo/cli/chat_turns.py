# SPDX-License-Identifier: Apache-2.0
"""Texts around the turns of a chat, as the template of a command's model writes them."""

from __future__ import annotations

from pathlib import Path

from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.errors import ChoreoError


def turns_of_model(model: str | None, template: Path | None = None) -> ChatTurns:
    """Texts around turns of a model that this machine loads.

    Args:
        model: folder or name; None: the small test model, which writes ChatML.
        template: file with a template in Jinja, to use instead of the model's own.

    Raises:
        ChoreoError: the tokenizer cannot be read, has no template, or writes no turns.
    """
    if model is None and template is None:
        return ChatTurns()
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import model_folder

    folder = model_folder(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ChoreoError(
            f"the tokenizer of {folder} cannot be read: {reason}", parameter="model", value=folder
        ) from error
    try:
        text = None if template is None else template.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChoreoError(
            f"cannot read {template}: {error}", parameter="--chat-template", value=str(template)
        ) from error
    if text is None and not getattr(tokenizer, "chat_template", None):
        raise ChoreoError(
            "the model has no chat template, so nobody knows how it reads turns: give one in Jinja "
            "with --chat-template FILE",
            parameter="model",
            value=folder,
        )
    return turns_of_tokenizer(tokenizer, text)
