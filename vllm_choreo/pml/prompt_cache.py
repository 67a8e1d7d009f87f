# SPDX-License-Identifier: Apache-2.0
"""`PromptCache`: schemas and prompts on any `Facade`.

cache = PromptCache(c, llm.get_tokenizer())
cache.register(open("travel.pml").read())
answer = cache.decode('<prompt schema="travel"><plan days="a week"/>Where to?</prompt>')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import SchemaLayout, Tokens
from vllm_choreo.pml.language.outline import outline
from vllm_choreo.pml.language.placing import PromptPlan
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import AskedPrompt, SchemaBook
from vllm_choreo.pml.language.tree import Prompt, Schema


class PromptCache:
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
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        placeholder: int | None = None,
    ) -> None:
        chat = ChatTemplate(tokenizer, chat_template)
        self._facade: Any = facade
        self._book = SchemaBook(Tokens(tokenizer, placeholder), chat, facade.mode)

    # -- schemas -----------------------------------------------------------------------------

    def register(
        self,
        schema: str | Schema,
        *,
        context: str = "modules",
        adapter: Any = None,
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

    def unregister(self, name: str) -> None:
        """Forget a schema, and free its messages.

        Raises:
            UnknownSchemaError: there is none of this name.
        """
        if freed := self._book.unregister(name):
            self._facade.free(*freed)

    def pin(self, name: str, **options: Any) -> None:
        """Encode a schema, and evict its messages after all others; see `Choreography.pin`."""
        self.encode(name)
        self._facade.pin(*self.messages(name), **options)

    def evict(self, name: str) -> None:
        """Drop the keys and values of a schema; prompts encode them again."""
        self._facade.evict(*self.messages(name))

    def messages(self, name: str) -> list[Any]:
        """Messages of the segments of a schema that are encoded."""
        self._book.named(name)
        return [handle for key, handle in self._book.handles.items() if key.schema == name]

    @property
    def schemas(self) -> dict[str, SchemaLayout]:
        """Layouts of all schemas, by name."""
        return {name: schema.layout for name, schema in self._book.schemas.items()}

    def show(self, name: str) -> str:
        """Show a schema as a tree, with tokens, positions, and what is encoded."""
        return outline(self._book.named(name).layout, self._book.handles)

    # -- prompts -----------------------------------------------------------------------------

    def plan(self, prompt: str | Prompt, **options: Any) -> PromptPlan:
        """Plan the calls that `decode` would make; raises as it does."""
        return self._book.asked(prompt, options).plan

    def decode(self, prompt: Any, **options: Any) -> Any:
        """Generate after a prompt, or after each of a list of prompts, in one batch.

        Args:
            prompt: markup or a `Prompt`; or a list of these, and of dicts that hold one under
                "prompt" beside options of its own.
            options: `layout`, "schema" or "compact" (see `placing`; "compact" in exact
                and in baseline mode);
                `messages`, what the prompt names by `<message name=…/>`; `sampling_params`,
                `save_as`, and, of all calls that a prompt makes, `mode`, `repair` (a rule),
                `adapter` and `deny`: as of `Choreography.decode`.

        Returns:
            A `PromptAnswer`, or a list of them.

        Raises:
            UnknownSchemaError: a prompt's schema is not registered.
            PmlError: a prompt that its schema does not allow; says at which line and column.
            ChoreoError: as `Choreography.decode`.
        """
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        asked = [self._book.asked(one, options) for one in (prompt if is_list else [prompt])]
        if not asked:
            raise PmlError("a list needs prompts", parameter="prompt")
        self._encode(key for one in asked for key in one.plan.keys)
        made: list[list[Any]] = [[] for _ in asked]
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
        answers = [PromptAnswer(m, one.plan.usage) for m, one in zip(messages, asked, strict=True)]
        return answers if is_list else answers[0]

    def _prefill(self, asked: Sequence[AskedPrompt], made: list[list[Any]]) -> None:
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

    def _call(self, asked: AskedPrompt, own: Sequence[Any], number: int) -> Mapping[str, Any]:
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
