# SPDX-License-Identifier: Apache-2.0
"""Prompts from schemas of reusable modules, in markup and in Python, over any facade; either side.

    markup  <->  tree  ->  layout (positions)  ->  plan of a prompt  ->  calls of a facade
    '---------------------- language/ ----------------------------'      prompt_cache.py

`PromptCache` and `AsyncPromptCache` are the last step; all before needs neither torch nor vLLM.
`server/` adds schemas to a server, `client/` has them on one: `ServerPrompts`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_choreo.pml.answer import PromptAnswer as PromptAnswer
    from vllm_choreo.pml.async_prompt_cache import AsyncPromptCache as AsyncPromptCache
    from vllm_choreo.pml.client.server_prompts import AsyncServerPrompts as AsyncServerPrompts
    from vllm_choreo.pml.client.server_prompts import ServerPrompts as ServerPrompts
    from vllm_choreo.pml.language.markup import parse as parse
    from vllm_choreo.pml.language.markup import parse_prompt as parse_prompt
    from vllm_choreo.pml.language.markup import parse_schema as parse_schema
    from vllm_choreo.pml.language.printer import to_markup as to_markup
    from vllm_choreo.pml.language.program import assistant as assistant
    from vllm_choreo.pml.language.program import message as message
    from vllm_choreo.pml.language.program import module as module
    from vllm_choreo.pml.language.program import param as param
    from vllm_choreo.pml.language.program import program as program
    from vllm_choreo.pml.language.program import prompt as prompt
    from vllm_choreo.pml.language.program import scaffold as scaffold
    from vllm_choreo.pml.language.program import schema as schema
    from vllm_choreo.pml.language.program import system as system
    from vllm_choreo.pml.language.program import union as union
    from vllm_choreo.pml.language.program import use as use
    from vllm_choreo.pml.language.program import user as user
    from vllm_choreo.pml.prompt_cache import PromptCache as PromptCache

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
    "program": "vllm_choreo.pml.language.program",
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


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
