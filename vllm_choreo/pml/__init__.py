# SPDX-License-Identifier: Apache-2.0
"""Prompts from schemas of reusable modules, in markup and in Python, over any facade; either side.

    markup  <->  tree  ->  layout (positions)  ->  plan of a prompt  ->  calls of a facade
    '---------------------- language/ ----------------------------'      prompt_cache.py

`PromptCache` and `AsyncPromptCache` are the last step; all before needs neither torch nor vLLM.
`server/` adds schemas to a server, `client/` has them on one: `ServerPrompts`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "PromptCache": "vllm_choreo.pml.prompt_cache",
    "AsyncPromptCache": "vllm_choreo.pml.async_prompt_cache",
    "ServerPrompts": "vllm_choreo.pml.client.server_prompts",
    "AsyncServerPrompts": "vllm_choreo.pml.client.server_prompts",
    "PromptAnswer": "vllm_choreo.pml.answer",
    "parse": "vllm_choreo.pml.language.markup",
    "parse_schema": "vllm_choreo.pml.language.markup",
    "parse_prompt": "vllm_choreo.pml.language.markup",
    "to_markup": "vllm_choreo.pml.language.printer",
    "schema": "vllm_choreo.pml.language.program",
    "module": "vllm_choreo.pml.language.program",
    "union": "vllm_choreo.pml.language.program",
    "param": "vllm_choreo.pml.language.program",
    "scaffold": "vllm_choreo.pml.language.program",
    "system": "vllm_choreo.pml.language.program",
    "user": "vllm_choreo.pml.language.program",
    "assistant": "vllm_choreo.pml.language.program",
    "use": "vllm_choreo.pml.language.program",
    "message": "vllm_choreo.pml.language.program",
    "prompt": "vllm_choreo.pml.language.program",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
