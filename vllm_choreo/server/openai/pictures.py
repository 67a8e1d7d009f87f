# SPDX-License-Identifier: Apache-2.0
"""Pictures of choreographed requests to vLLM's routes: named as those of other calls are.

vLLM's handlers render a request before the engine client sees it. There a picture has the name that
its sender has chosen for it (`uuid`), or else that of its content for all tenants alike; and what
the engine is believed to have is left out (see `api/pictures.py`). So a choreographed request is
rendered by vLLM's renderer with other names.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm_choreo.api.pictures import named_pictures
from vllm_choreo.semantics.pictures import IMAGE

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer
    from vllm.renderers.online_renderer import OnlineRenderer

# What is done with a prompt between its template and its tokens.
Change = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class PictureReader(Protocol):
    """Whoever reads the prompt of a request.

    Attributes:
        tenant: tenant whose request it is.
        is_asked: whether what makes no message is refused; else it is left as it is.
        has_named_pictures: whether the pictures of the prompt have names by their content.
    """

    is_asked: bool
    has_named_pictures: bool

    @property
    def tenant(self) -> str: ...


def with_named_pictures(online: OnlineRenderer, reader: PictureReader) -> OnlineRenderer:
    """Return a renderer like this one, which names pictures by what they show and by the tenant."""
    tenant = reader.tenant

    async def named(prompt: dict[str, Any]) -> dict[str, Any]:
        if not (data := prompt.get("multi_modal_data")):
            return prompt
        has_own_names = any(map(any, (prompt.get("multi_modal_uuids") or {}).values()))
        if not reader.is_asked and (has_own_names or data.keys() != {IMAGE}):
            return prompt
        shown = await asyncio.to_thread(named_pictures, tenant, data, "messages")
        reader.has_named_pictures = True
        return {**prompt, **shown}

    return _changed(online, named)


def without_pictures(online: OnlineRenderer) -> OnlineRenderer:
    """Return a renderer like this one, which leaves a placeholder in place of each picture."""

    async def text(prompt: dict[str, Any]) -> dict[str, Any]:
        return {key: prompt[key] for key in prompt if not key.startswith("multi_modal_")}

    return _changed(online, text)


def _changed(online: OnlineRenderer, change: Change) -> OnlineRenderer:
    changed = copy.copy(online)
    changed.renderer = cast("BaseRenderer", _ChangingRenderer(online.renderer, change))
    return changed


class _ChangingRenderer:
    """vLLM's renderer, but for what is done with the prompts of chats on their way."""

    def __init__(self, renderer: BaseRenderer, change: Change) -> None:
        self._renderer = renderer
        self._change = change
        self._has_changed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._renderer, name)

    async def render_messages_async(
        self, messages: Sequence[Any], params: object
    ) -> tuple[object, dict[str, Any]]:
        conversation, prompt = await self._renderer.render_messages_async(
            cast("Any", messages), cast("Any", params)
        )
        changed = await self._change(cast("dict[str, Any]", prompt))
        self._has_changed = changed is not prompt
        return conversation, changed

    async def render_chat_async(
        self, conversations: Sequence[Any], *args: object, **options: object
    ) -> object:
        # vLLM's method on this object, so that it finds the others here.
        render = type(self._renderer).render_chat_async
        return await render(cast("Any", self), conversations, *args, **options)

    async def process_for_engine_async(
        self, prompt: object, *args: object, **options: object
    ) -> object:
        options["skip_mm_cache"] = options["skip_mm_cache"] or self._has_changed
        return await self._renderer.process_for_engine_async(prompt, *args, **options)
