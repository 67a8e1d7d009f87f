# SPDX-License-Identifier: Apache-2.0
"""Prompts in a session of the server: from what a request asks to the calls that it makes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm_choreo.api.pending import Pending
from vllm_choreo.errors import ChoreoError, LimitError, TooLongError
from vllm_choreo.pml.async_prompt_cache import AsyncPromptCache
from vllm_choreo.pml.language.registered import EncodingKey, RegisteredSchema
from vllm_choreo.pml.language.schema_book import AskedPrompt, SchemaBook
from vllm_choreo.pml.language.structure import num_new_chars, passed_names
from vllm_choreo.pml.language.tree import Prompt
from vllm_choreo.semantics.call import CallSpec, linked_specs, submitted_spec
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.schemas import MAX_PARENTS
from vllm_choreo.server.sessions import OpenSession
from vllm_choreo.server.work_pool import WorkPool

# Whose messages the modules of the operator's schemas are. Tenants are named by hashes.
OPERATOR = "operator"


@dataclasses.dataclass(frozen=True)
class PromptCalls:
    """The calls of a prompt.

    Attributes:
        asked: the prompt.
        pieces: calls that encode text before the last call; later ones name earlier ones.
        header: token ids of the last call's header.
        options: options of the last call, but for its sampling.
    """

    asked: AskedPrompt
    pieces: list[CallSpec]
    header: tuple[int, ...]
    options: dict[str, Any]

    def last(self, **options: object) -> CallSpec:
        """The call that generates."""
        (spec,) = linked_specs([{"header": self.header, **self.options, **options}])
        return spec


class SessionPrompts(AsyncPromptCache):
    """The prompts of one session.

    Args:
        session: the session.
        book: book of the schemas that the session can name.
        operators: schemas whose modules are the operator's messages, by name.
        work: pool for work that grows with a prompt.
        max_chars: most characters of a prompt's new text; more fit into no context.
    """

    def __init__(
        self,
        session: OpenSession,
        book: SchemaBook,
        operators: Mapping[str, RegisteredSchema],
        work: WorkPool,
        max_chars: int,
    ) -> None:
        super().__init__(session.choreography, book=book)
        self._choreography = session.choreography
        self._tenant = session.tenant
        self._operators = operators
        self._work = work
        self._max_chars = max_chars

    async def calls(
        self, read: Callable[[], Prompt], options: Mapping[str, Any], max_calls: int
    ) -> PromptCalls:
        """Plan the calls of a prompt, and have its modules encoded.

        Args:
            read: makes the prompt of its text, which takes a while if that is long.
            options: options of `PromptCache.decode`; a message that the prompt names and that is
                not passed is the session's of that name.
            max_calls: most calls that it may take.

        Raises:
            ChoreoError: the prompt is illegal, or takes too many calls.
        """
        asked, known = await self._work.run(self._tenant, self._asked, read, options)
        calls = asked.plan.calls
        if len(calls) > max_calls or sum(call.num_parts for call in calls) > MAX_PARENTS:
            raise LimitError(
                f"a prompt takes up to {max_calls} calls, which read up to {MAX_PARENTS} parts: "
                "put its new text to the end",
                parameter="prompt",
                value=f"{len(calls)} calls",
            )
        self._drop_freed(known)
        await self.encode_keys(asked.plan.keys)
        self._book.check_same(asked)
        tag = f"pml.{secrets.token_hex(8)}"
        names = [f"{tag}.{number}" for number in range(len(calls) - 1)]
        pieces = [
            {"tokens": call.token_ids, "save_as": name, **self._call(asked, call, names)}
            for name, call in zip(names, calls, strict=False)
        ]
        last = self._call(asked, asked.plan.header, names) | dict(asked.for_last)
        return PromptCalls(asked, linked_specs(pieces), asked.plan.header.token_ids, last)

    def _asked(
        self, read: Callable[[], Prompt], options: Mapping[str, Any]
    ) -> tuple[AskedPrompt, list[EncodingKey]]:
        """A prompt with its plan, and the keys of all encodings that it needs."""
        tree = read()
        if (num_chars := num_new_chars(tree)) > self._max_chars:
            raise TooLongError(
                f"{num_chars} characters of new text do not fit into the context; send less",
                parameter="prompt",
            )
        named = {name: name for name in passed_names(tree)} | dict(options.get("messages") or {})
        messages = {name: self._found(message_id) for name, message_id in named.items()}
        asked = self._book.asked(tree, {**options, "messages": messages})
        return asked, self._book.with_needs(asked.plan.keys)

    def _found(self, message_id: str) -> Message | str:
        """The message, whose length is known, if it is complete; else `message_id`."""
        try:
            return self._choreography.message(message_id)
        except ChoreoError:
            return message_id

    def _drop_freed(self, needed: Sequence[EncodingKey]) -> None:
        """Forget encodings that the tenant has freed, so that they are encoded again."""
        for key in needed:
            if (handle := self._book.handles.get(key)) is not None:
                with suppress(ChoreoError):
                    self._choreography.message(handle)
                    continue
                del self._book.handles[key]

    async def prefetch(self, name: str, module: str) -> int:
        """Bring the unions around a module into the KV cache: `PromptCache.prefetch`."""

        def found() -> tuple[list[EncodingKey], list[EncodingKey]]:
            keys = self._book.named(name).union_keys(module)
            return keys, self._book.with_needs(keys)

        keys, needed = await self._work.run(self._tenant, found)
        self._drop_freed(needed)
        return await self._prefetch(keys)

    async def _submit(self, key: EncodingKey, call: dict[str, Any]) -> Pending:
        tokens = call.pop("tokens")
        spec = submitted_spec(None, tokens, call)
        if key.schema in self._operators:
            spec = dataclasses.replace(spec, tenant=OPERATOR)
        (pending,) = await self._choreography.submit_all([spec])
        return pending

    async def forget(self, name: str) -> None:
        """Free the messages of a schema that is deleted."""
        handles = self._book.handles
        for key in [key for key in handles if key.schema == name]:
            await self.free_one(handles.pop(key))

    async def free_one(self, message: Message) -> None:
        """Free a message that others may have freed, or whose session may be closed."""
        with suppress(ChoreoError):
            await self._choreography.free(message)

    async def free_pieces(
        self, pending: Sequence[Pending], after: asyncio.Event | None = None
    ) -> None:
        """Free the messages that a prompt made before its last call.

        Args:
            pending: handles of the calls that make them.
            after: event that is waited for: a message that is freed before the last call is with
                the engine cannot be named by it. None: the engine has that call.
        """
        if after is not None:
            await after.wait()
        for one in pending:
            result = await one.result()
            if isinstance(result, Message):
                await self.free_one(result)
