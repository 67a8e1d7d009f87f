# SPDX-License-Identifier: Apache-2.0
"""Chat turns as pieces of text, in the template of ChatML models (SmolLM2, Qwen and others).

A message is one turn; see `TurnTemplate`.
"""

from __future__ import annotations

from vllm_choreo.chat.template import TurnTemplate

_CHATML = TurnTemplate()


def system(text: str) -> str:
    """A whole system turn."""
    return _CHATML.turn("system", text)


def user(text: str) -> str:
    """A whole user turn."""
    return _CHATML.turn("user", text)


def restated(question: str) -> str:
    """A user turn that says once more what was asked: encoded by the reader, after all it reads."""
    return user(f"Once more, the question: {question}")


def assistant(opening: str = "") -> str:
    """The beginning of an assistant turn, for the model to go on from."""
    return _CHATML.begin("assistant") + opening
