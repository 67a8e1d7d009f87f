# SPDX-License-Identifier: Apache-2.0
"""`AsyncPromptCache`: schemas and prompts on any `AsyncFacade`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Unpack

from vllm_choreo.api.protocol import AsyncFacade, PendingMessage
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.cache_base import CacheBase, new_book
from vllm_choreo.pml.language.layout import ChatTokenizer, SchemaLayout
from vllm_choreo.pml.language.placing import FreshCall
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import AskedPrompt, PromptGiven, SchemaBook
from vllm_choreo.pml.language.tree import Schema
from vllm_choreo.pml.options import PinOptions, PromptOptions
from vllm_choreo.semantics.message import Piece
from vllm_choreo.semantics.session_options import AdapterGiven


class AsyncPromptCache(CacheBase):
    """A `PromptCache` for prompts that come one by one and overlap.

    Args:
        facade, tokenizer, chat_template, placeholder: see `PromptCache`.
        book: schemas and handles that are kept elsewhere; instead of all but the facade.
    """

    def __init__(
        self,
        facade: AsyncFacade,
        tokenizer: ChatTokenizer | None = None,
        *,
        chat_template: str | None = None,
        placeholder: int | None = None,
        book: SchemaBook | None = None,
    ) -> None:
        if book is None:
            assert tokenizer is not None, "a book or a tokenizer is needed"
            book = new_book(tokenizer, chat_template, placeholder, facade.mode)
        super().__init__(book)
        self._facade = facade
        self._encoding = asyncio.Lock()

    async def register(
        self,
        schema: str | Schema,
        *,
        context: str = "modules",
        adapter: AdapterGiven = None,
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

    async def prefetch(self, name: str, module: str) -> int:
        """Bring all members of the unions around a module into the KV cache.

        See `PromptCache.prefetch`.
        """
        return await self._prefetch(self._book.named(name).union_keys(module))

    async def _prefetch(self, keys: Sequence[EncodingKey]) -> int:
        known = [key for key in keys if key in self._book.handles]
        count = await self.encode_keys(keys)
        touched = [await self._facade.submit(**self._book.touch(key)) for key in known]
        results = await asyncio.gather(*(one.result() for one in touched))
        messages = [result for result in results if not isinstance(result, Exception)]
        if messages:
            await self._facade.free(*messages)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return count

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
            pending: dict[EncodingKey, PendingMessage] = {}
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

    async def _submit(self, key: EncodingKey, call: dict[str, Any]) -> PendingMessage:
        """Start the prefill that encodes a segment."""
        return await self._facade.submit(**call)

    async def unregister(self, name: str) -> None:
        """Forget a schema, and free its messages, see `PromptCache.unregister`."""
        if freed := self._book.unregister(name):
            await self._facade.free(*freed)

    async def pin(self, name: str, **options: Unpack[PinOptions]) -> None:
        """Encode a schema, and evict its messages after all others, see `PromptCache.pin`."""
        await self.encode(name)
        await self._facade.pin(*self.messages(name), **options)

    async def evict(self, name: str) -> None:
        """Drop the keys and values of a schema; prompts encode them again."""
        await self._facade.evict(*self.messages(name))

    @property
    def encoded(self) -> frozenset[EncodingKey]:
        """Encodings that there are, of all schemas."""
        return frozenset(self._book.handles)

    async def decode(self, prompt: PromptGiven, **options: Unpack[PromptOptions]) -> PromptAnswer:
        """Generate after one prompt, see `PromptCache.decode`; gather several for one batch."""
        async with self._prepared(prompt, options) as (asked, call):
            message = await self._facade.decode(list(asked.plan.header.token_ids), **call)
        return PromptAnswer(message, asked.plan.usage)

    async def stream_decode(
        self, prompt: PromptGiven, **options: Unpack[PromptOptions]
    ) -> AsyncIterator[Piece]:
        """Generate after a prompt, piece by piece; the last piece carries the message."""
        async with (
            self._prepared(prompt, options) as (asked, call),
            # Closed with this one: a caller who leaves early ends the call.
            aclosing(
                self._facade.stream_decode(list(asked.plan.header.token_ids), **call)
            ) as pieces,
        ):
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def _prepared(
        self, prompt: PromptGiven, options: Mapping[str, Any]
    ) -> AsyncIterator[tuple[AskedPrompt, dict[str, Any]]]:
        """Prepare the last call of a prompt; earlier ones are under way, and freed at the end."""
        asked = self._book.asked(prompt, options)
        await self.encode_keys(asked.plan.keys)
        self._book.check_same(asked)
        made: list[PendingMessage] = []
        try:
            for fresh in asked.plan.calls[:-1]:
                call = self._call(asked, fresh, made)
                made.append(await self._facade.submit(tokens=list(fresh.token_ids), **call))
            yield asked, {**self._call(asked, asked.plan.header, made), **asked.for_last}
        finally:
            done = await asyncio.gather(*(one.result() for one in made))
            if own := [message for message in done if not isinstance(message, Exception)]:
                await self._facade.free(*own)

    def _call(
        self, asked: AskedPrompt, fresh: FreshCall, made: Sequence[str | PendingMessage]
    ) -> dict[str, Any]:
        return self._book.call(asked, fresh, lambda number: made[number])
