# SPDX-License-Identifier: Apache-2.0
"""Choreographed LLM calls in vLLM: attend to any encoded messages, in any order, anywhere.

Importing this package loads neither torch nor vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vllm_choreo import moved

if TYPE_CHECKING:
    from vllm_choreo.api.async_choreography import AsyncChoreography as AsyncChoreography
    from vllm_choreo.api.choreography import Choreography as Choreography
    from vllm_choreo.client import AsyncChoreoClient as AsyncChoreoClient
    from vllm_choreo.client import ChoreoClient as ChoreoClient
    from vllm_choreo.errors import ChoreoError as ChoreoError
    from vllm_choreo.semantics.call_options import Call as Call
    from vllm_choreo.semantics.message import Message as Message
    from vllm_choreo.semantics.params import ChoreoParams as ChoreoParams

# The one place: pyproject.toml reads it from here.
__version__ = "0.3.0.dev0"

_EXPORTS = {
    "Choreography": "vllm_choreo.api.choreography",
    "AsyncChoreography": "vllm_choreo.api.async_choreography",
    "ChoreoClient": "vllm_choreo.client",
    "AsyncChoreoClient": "vllm_choreo.client",
    "Call": "vllm_choreo.semantics.call_options",
    "Message": "vllm_choreo.semantics.message",
    "ChoreoParams": "vllm_choreo.semantics.params",
    "ChoreoError": "vllm_choreo.errors",
}

__all__ = ["__version__", "register", *_EXPORTS]


moved.install()


def register() -> None:
    """Install the plugin; vLLM calls this entry point in every process, maybe repeatedly."""
    from vllm_choreo.engine.plugin import install

    install()


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
