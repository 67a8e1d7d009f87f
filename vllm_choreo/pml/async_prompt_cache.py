# SPDX-License-Identifier: Apache-2.0
"""`AsyncPromptCache`: schemas and prompts on any `AsyncFacade`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from vllm_choreo.api.protocol import AsyncFacade
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import SchemaLayout, Tokens
from vllm_choreo.pml.language.outline import outline
from vllm_choreo.pml.language.placing import PromptPlan
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import AskedPrompt, SchemaBook
from vllm_choreo.pml.language.tree import Prompt, Schema
from vllm_choreo.semantics.message import Piece


class AsyncPromptCache:
    """A `PromptCache` for prompts that come one by one and overlap.

    Args:
        facade, tokenizer, chat_template, placeholder: see `PromptCache`.
        book: schemas and handles that are kept elsewhere; instead of all but the facade.
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
        """Add a schema, see `PromptCache.register`."""
        made = self._book.register(schema, context=context, adapter=adapter)
        if encode:
            await self.encode(made.name)
        return made.layout

    async def encode(self, name: str) -> int:
        """Encode all of a schema that is not encoded yet; return of how many segments."""
        return await self.encode_keys(self._book.named(name).all_keys())

    async def encode_keys(self, keys: Iterable[EncodingKey]) -> int:
        """Encode what is missing of these; return how many encodings that were.

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
        """Forget a schema, and free its messages, see `PromptCache.unregister`."""
        if freed := self._book.unregister(name):
            await self._facade.free(*freed)

    async def pin(self, name: str, **options: Any) -> None:
        """Encode a schema, and evict its messages after all others, see `PromptCache.pin`."""
        await self.encode(name)
        await self._facade.pin(*self.messages(name), **options)

    async def evict(self, name: str) -> None:
        """Drop the keys and values of a schema; prompts encode them again."""
        await self._facade.evict(*self.messages(name))

    def messages(self, name: str) -> list[Any]:
        """Messages of the segments of a schema that are encoded."""
        self._book.named(name)
        return [handle for key, handle in self._book.handles.items() if key.schema == name]

    @property
    def encoded(self) -> frozenset[EncodingKey]:
        """Encodings that there are, of all schemas."""
        return frozenset(self._book.handles)

    @property
    def schemas(self) -> dict[str, SchemaLayout]:
        """Layouts of all schemas, by name."""
        return {name: schema.layout for name, schema in self._book.schemas.items()}

    def show(self, name: str) -> str:
        """Show a schema as a tree, see `PromptCache.show`."""
        return outline(self._book.named(name).layout, self._book.handles)

    def plan(self, prompt: str | Prompt, **options: Any) -> PromptPlan:
        """Plan the calls that `decode` would make; raises as it does."""
        return self._book.asked(prompt, options).plan

    async def decode(self, prompt: str | Prompt, **options: Any) -> PromptAnswer:
        """Generate after one prompt, see `PromptCache.decode`; gather several for one batch."""
        async with self._prepared(prompt, options) as (asked, call):
            message = await self._facade.decode(**call)
        return PromptAnswer(message, asked.plan.usage)

    async def stream_decode(self, prompt: str | Prompt, **options: Any) -> AsyncIterator[Piece]:
        """Generate after a prompt, piece by piece; the last piece carries the message."""
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
        """Prepare the last call of a prompt; earlier ones are under way, and freed at the end."""
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
