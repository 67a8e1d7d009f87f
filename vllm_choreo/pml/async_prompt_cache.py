# SPDX-License-Identifier: Apache-2.0
"""`AsyncPromptCache`: schemas and prompts on any `AsyncFacade`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from vllm_choreo.api.protocol import AsyncFacade
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.chat_template import ChatTemplate
from vllm_choreo.pml.layout import SchemaLayout, Tokens
from vllm_choreo.pml.outline import outline
from vllm_choreo.pml.placing import PromptPlan
from vllm_choreo.pml.registered import EncodingKey
from vllm_choreo.pml.schema_book import AskedPrompt, SchemaBook
from vllm_choreo.pml.tree import Prompt, Schema
from vllm_choreo.semantics.message import Piece


class AsyncPromptCache:
    """As `PromptCache`, for prompts that come one by one and overlap.

    Args:
        facade, tokenizer, chat_template, placeholder: see `PromptCache`.
        book: what is registered, if it is kept elsewhere; instead of all but the facade.
    """

    def __init__(
        self,
        facade: AsyncFacade,
        tokenizer: Any = None,
        *,
        chat_template: str | None = None,
        placeholder: int | None = None,
        book: SchemaBook | None = None,
    ) -> None:
        if book is None:
            chat = ChatTemplate(tokenizer, chat_template)
            book = SchemaBook(Tokens(tokenizer, placeholder), chat, facade.mode)
        self._facade: Any = facade
        self._book = book
        self._encoding = asyncio.Lock()

    async def register(
        self,
        schema: str | Schema,
        *,
        context: str = "modules",
        adapter: Any = None,
        encode: bool = False,
    ) -> SchemaLayout:
        """See `PromptCache.register`."""
        made = self._book.register(schema, context=context, adapter=adapter)
        if encode:
            await self.encode(made.name)
        return made.layout

    async def encode(self, name: str) -> int:
        """See `PromptCache.encode`."""
        return await self.encode_keys(self._book.named(name).all_keys())

    async def encode_keys(self, keys: Iterable[EncodingKey]) -> int:
        """Encode what is missing of these; returns how many there were.

        All are handed to the engine at once, and each is encoded as soon as what it reads is. They
        are encoded to the end, whether or not the caller waits for it.
        """
        wanted = list(keys)
        if not self._book.missing(wanted):
            return 0  # without waiting for what others encode
        return await asyncio.shield(self._encode(wanted))

    async def _encode(self, keys: Sequence[EncodingKey]) -> int:
        async with self._encoding:
            waiting = self._book.missing(keys)
            pending: dict[EncodingKey, Any] = {}
            try:
                for key in waiting:
                    await asyncio.sleep(0)  # others are to be served between two of many
                    pending[key] = await self._submit(key, self._book.encoding(key, pending))
            finally:
                results = await asyncio.gather(*(one.result() for one in pending.values()))
                for key, result in zip(pending, results, strict=True):
                    if not isinstance(result, Exception):
                        self._book.handles[key] = result
            for result in results:
                if isinstance(result, Exception):
                    raise result
            return len(waiting)

    async def _submit(self, key: EncodingKey, call: dict[str, Any]) -> Any:
        """Start the prefill that encodes a segment."""
        return await self._facade.submit(**call)

    async def unregister(self, name: str) -> None:
        """See `PromptCache.unregister`."""
        if freed := self._book.unregister(name):
            await self._facade.free(*freed)

    async def pin(self, name: str, **options: Any) -> None:
        """See `PromptCache.pin`."""
        await self.encode(name)
        await self._facade.pin(*self.messages(name), **options)

    async def evict(self, name: str) -> None:
        """See `PromptCache.evict`."""
        await self._facade.evict(*self.messages(name))

    def messages(self, name: str) -> list[Any]:
        """See `PromptCache.messages`."""
        self._book.named(name)
        return [handle for key, handle in self._book.handles.items() if key.schema == name]

    @property
    def encoded(self) -> frozenset[EncodingKey]:
        """What is encoded of all schemas."""
        return frozenset(self._book.handles)

    @property
    def schemas(self) -> dict[str, SchemaLayout]:
        """The layouts of all schemas, by name."""
        return {name: schema.layout for name, schema in self._book.schemas.items()}

    def show(self, name: str) -> str:
        """See `PromptCache.show`."""
        return outline(self._book.named(name).layout, self._book.handles)

    def plan(self, prompt: str | Prompt, **options: Any) -> PromptPlan:
        """See `PromptCache.plan`."""
        return self._book.asked(prompt, options).plan

    async def decode(self, prompt: str | Prompt, **options: Any) -> PromptAnswer:
        """See `PromptCache.decode`; one prompt. Gather several: they run in one batch."""
        async with self._prepared(prompt, options) as (asked, call):
            message = await self._facade.decode(**call)
        return PromptAnswer(message, asked.plan.usage)

    async def stream_decode(self, prompt: str | Prompt, **options: Any) -> AsyncIterator[Piece]:
        """As `decode`, piece by piece; the last one carries the message."""
        async with (
            self._prepared(prompt, options) as (_, call),
            # Closed with this one: a caller who leaves early ends the call.
            aclosing(self._facade.stream_decode(**call)) as pieces,
        ):
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def _prepared(
        self, prompt: Any, options: Mapping[str, Any]
    ) -> AsyncIterator[tuple[AskedPrompt, dict[str, Any]]]:
        """The last call of a prompt; those before it are on their way, and freed at the end."""
        asked = self._book.asked(prompt, options)
        await self.encode_keys(asked.plan.keys)
        self._book.check_same(asked)
        made: list[Any] = []
        try:
            for fresh in asked.plan.calls[:-1]:
                call = self._call(asked, fresh, made)
                made.append(await self._facade.submit(tokens=list(fresh.token_ids), **call))
            header = asked.plan.header
            call = self._call(asked, header, made)
            yield asked, {"header": list(header.token_ids), **call, **asked.for_last}
        finally:
            done = await asyncio.gather(*(one.result() for one in made))
            if own := [message for message in done if not isinstance(message, Exception)]:
                await self._facade.free(*own)

    def _call(self, asked: AskedPrompt, fresh: Any, made: Sequence[Any]) -> dict[str, Any]:
        return self._book.call(asked, fresh, lambda number: made[number])
