# SPDX-License-Identifier: Apache-2.0
"""Chat turns as pieces of text, in the template of ChatML models (SmolLM2, Qwen and others).

A message is one turn. `<|im_start|>` and `<|im_end|>` are single tokens, so the pieces tokenise
apart as they do together.
"""

from __future__ import annotations


def system(text: str) -> str:
    """A whole system turn."""
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def user(text: str) -> str:
    """A whole user turn."""
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def restated(question: str) -> str:
    """A user turn that says once more what was asked: encoded by the reader, after all it reads."""
    return user(f"Once more, the question: {question}")


def assistant(opening: str = "") -> str:
    """The beginning of an assistant turn, for the model to go on from."""
    return f"<|im_start|>assistant\n{opening}"
