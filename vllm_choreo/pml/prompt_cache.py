# SPDX-License-Identifier: Apache-2.0
"""`PromptCache`: schemas and prompts on any `Facade`.

cache = PromptCache(c, llm.get_tokenizer())
cache.register(open("travel.pml").read())
answer = cache.decode('<prompt schema="travel"><plan days="a week"/>Where to?</prompt>')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast, overload

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.errors import PmlError, UnsupportedOptionError
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.cache_base import CacheBase, new_book
from vllm_choreo.pml.language.layout import ChatTokenizer, SchemaLayout
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import AskedPrompt, PromptGiven
from vllm_choreo.pml.language.tree import Prompt, Schema
from vllm_choreo.pml.options import PinOptions, PromptOptions
from vllm_choreo.semantics.call import num_answers
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import AdapterGiven

_Prompt = TypeVar("_Prompt", bound=str | Prompt | Mapping[str, Any])


class PromptCache(CacheBase):
    """Schemas whose modules are messages of a session: encoded once, read by all prompts.

    Args:
        facade: makes the messages; closing it frees them.
        tokenizer: the model's, of transformers: `encode`, `apply_chat_template`, `unk_token_id`.
        chat_template: the template to use instead of the tokenizer's own.
        placeholder: the token that stands in for arguments; None: the unknown token, or a space.
    """

    def __init__(
        self,
        facade: Facade,
        tokenizer: ChatTokenizer,
        *,
        chat_template: str | None = None,
        placeholder: int | None = None,
    ) -> None:
        super().__init__(new_book(tokenizer, chat_template, placeholder, facade.mode))
        # Pins and evictions alone need more than a `Facade`.
        self._facade = cast("SessionFacade", facade)

    # -- schemas -----------------------------------------------------------------------------

    def register(
        self,
        schema: str | Schema,
        *,
        context: str = "modules",
        adapter: AdapterGiven = None,
        encode: bool = False,
    ) -> SchemaLayout:
        """Add a schema. Registering the same one again does nothing.

        Args:
            schema: markup, or a `Schema`.
            context: "modules": each module is encoded alone; "schema": behind the text that is
                always there with it.
            adapter: the adapter that encodes its modules.
            encode: whether to encode it now, with all its scaffolds; otherwise modules are encoded
                when a prompt first takes them.

        Raises:
            NameTakenError: another schema of this name is registered.
            PmlError: it is none; says at which line and column.
        """
        made = self._book.register(schema, context=context, adapter=adapter)
        if encode:
            self.encode(made.name)
        return made.layout

    def encode(self, name: str) -> int:
        """Encode all of a schema that is not encoded yet; return of how many segments."""
        return self._encode(self._book.named(name).all_keys())

    def prefetch(self, name: str, module: str) -> int:
        """Bring all members of the unions around a module into the KV cache.

        Prompts that take one member of a union are often followed by those that take another.
        Members that were never encoded are encoded, and those that were evicted come back.

        Args:
            name: name of the schema.
            module: path of a member, such as "overseas/tokyo".

        Returns:
            The number of segments that were encoded for the first time.

        Raises:
            PmlError: there is no such module, or it stands in no union.
        """
        keys = self._book.named(name).union_keys(module)
        known = [key for key in keys if key in self._book.handles]
        count = self._encode(keys)
        if known:
            self._facade.free(*self._facade.prefill([self._book.touch(key) for key in known]))
        return count

    def unregister(self, name: str) -> None:
        """Forget a schema, and free its messages.

        Raises:
            UnknownSchemaError: there is none of this name.
        """
        if freed := self._book.unregister(name):
            self._facade.free(*freed)

    def pin(self, name: str, **options: Unpack[PinOptions]) -> None:
        """Encode a schema, and evict its messages after all others; see `Choreography.pin`."""
        self.encode(name)
        self._facade.pin(*self.messages(name), **options)

    def evict(self, name: str) -> None:
        """Drop the keys and values of a schema; prompts encode them again."""
        self._facade.evict(*self.messages(name))

    # -- prompts -----------------------------------------------------------------------------

    @overload
    def decode(self, prompt: PromptGiven, **options: Unpack[PromptOptions]) -> PromptAnswer: ...

    @overload
    def decode(
        self, prompt: list[_Prompt] | tuple[_Prompt, ...], **options: Unpack[PromptOptions]
    ) -> list[PromptAnswer]: ...

    def decode(
        self,
        prompt: PromptGiven | list[_Prompt] | tuple[_Prompt, ...],
        **options: Unpack[PromptOptions],
    ) -> PromptAnswer | list[PromptAnswer]:
        """Generate after a prompt, or after each of a list of prompts, in one batch.

        Args:
            prompt: markup or a `Prompt`; or a list of these, and of dicts that hold one under
                "prompt" beside options of its own.
            options: see `PromptOptions`.

        Returns:
            A `PromptAnswer`, or a list of them.

        Raises:
            UnknownSchemaError: a prompt's schema is not registered.
            PmlError: a prompt that its schema does not allow; says at which line and column.
            ChoreoError: as `Choreography.decode`.
        """
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            return self._answers([prompt], options)[0]
        return self._answers(prompt, options)

    def _answers(
        self, prompts: Sequence[PromptGiven], options: Mapping[str, Any]
    ) -> list[PromptAnswer]:
        asked = [self._book.asked(one, options) for one in prompts]
        if not asked:
            raise PmlError("a list needs prompts", parameter="prompt")
        for one in asked:
            if (count := num_answers(one.for_last.get("sampling_params"))) > 1:
                raise UnsupportedOptionError(
                    "a prompt has one answer: list it as often as you want answers",
                    parameter="n",
                    value=count,
                )
        self._encode(key for one in asked for key in one.plan.keys)
        made: list[list[Message]] = [[] for _ in asked]
        try:
            self._prefill(asked, made)
            calls = [
                {
                    "header": list(one.plan.header.token_ids),
                    **self._call(one, own, -1),
                    **one.for_last,
                }
                for one, own in zip(asked, made, strict=True)
            ]
            messages = self._facade.decode(calls)
        finally:
            if own := [message for each in made for message in each]:
                self._facade.free(*own)
        return [PromptAnswer(m, one.plan.usage) for m, one in zip(messages, asked, strict=True)]

    def _prefill(self, asked: Sequence[AskedPrompt], made: list[list[Message]]) -> None:
        """Prefill all but the last calls: the first of every prompt at once, then the second."""
        for number in range(max(len(one.plan.calls) for one in asked) - 1):
            chosen = [i for i, one in enumerate(asked) if number < len(one.plan.calls) - 1]
            calls = [
                {
                    "tokens": list(asked[i].plan.calls[number].token_ids),
                    **self._call(asked[i], made[i], number),
                }
                for i in chosen
            ]
            for i, message in zip(chosen, self._facade.prefill(calls), strict=True):
                made[i].append(message)

    def _call(self, asked: AskedPrompt, own: Sequence[Message], number: int) -> Mapping[str, Any]:
        return self._book.call(asked, asked.plan.calls[number], lambda number: own[number])

    def _encode(self, keys: Iterable[EncodingKey]) -> int:
        """Encode what is missing of these in as few rounds as may be; return how many that was."""
        waiting = self._book.missing(keys)
        count = len(waiting)
        while waiting:
            ready = self._book.ready(waiting)
            messages = self._facade.prefill([self._book.encoding(key) for key in ready])
            self._book.handles.update(zip(ready, messages, strict=True))
            waiting = [key for key in waiting if key not in self._book.handles]
        return count
