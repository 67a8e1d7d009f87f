# SPDX-License-Identifier: Apache-2.0
"""Help for tests of programs that choreograph: small models, a server, answers to compare with.

Importing this package loads neither torch nor vllm; see docs/testing.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_choreo.testing.models.embedded import embedded_model as embedded_model
    from vllm_choreo.testing.models.tiny import make_tiny_model as make_tiny_model
    from vllm_choreo.testing.reference import Made as Made
    from vllm_choreo.testing.reference import Reference as Reference
    from vllm_choreo.testing.script import Script as Script
    from vllm_choreo.testing.server import Server as Server
    from vllm_choreo.testing.server import start_server as start_server

_EXPORTS = {
    "embedded_model": "vllm_choreo.testing.models.embedded",
    "make_tiny_model": "vllm_choreo.testing.models.tiny",
    "Made": "vllm_choreo.testing.reference",
    "Reference": "vllm_choreo.testing.reference",
    "Script": "vllm_choreo.testing.script",
    "Server": "vllm_choreo.testing.server",
    "start_server": "vllm_choreo.testing.server",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
