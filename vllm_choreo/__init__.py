# SPDX-License-Identifier: Apache-2.0
"""Choreographed LLM calls in vLLM: attend to any encoded messages, in any order, anywhere.

Importing this package loads neither torch nor vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Choreography": "vllm_choreo.api.choreography",
    "AsyncChoreography": "vllm_choreo.api.async_choreography",
    "ChoreoClient": "vllm_choreo.client",
    "AsyncChoreoClient": "vllm_choreo.client",
    "Message": "vllm_choreo.semantics.message",
    "ChoreoParams": "vllm_choreo.semantics.params",
    "ChoreoError": "vllm_choreo.errors",
}

__all__ = ["__version__", "register", *_EXPORTS]


def register() -> None:
    """Install the plugin; vLLM calls this entry point in every process, maybe repeatedly."""
    from vllm_choreo.engine.plugin import install

    install()


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
