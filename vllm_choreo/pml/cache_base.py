# SPDX-License-Identifier: Apache-2.0
"""Base of `PromptCache` and `AsyncPromptCache`: all that asks nothing of the engine."""

from __future__ import annotations

from typing import Unpack

from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import ChatTokenizer, SchemaLayout, Tokens
from vllm_choreo.pml.language.outline import outline
from vllm_choreo.pml.language.placing import PromptPlan
from vllm_choreo.pml.language.schema_book import PromptGiven, SchemaBook
from vllm_choreo.pml.options import PromptOptions
from vllm_choreo.semantics.message import Message


def new_book(
    tokenizer: ChatTokenizer, chat_template: str | None, placeholder: int | None, mode: str
) -> SchemaBook:
    """Make an empty book; arguments as of `PromptCache`, and the mode of its facade."""
    chat = ChatTemplate(tokenizer, chat_template)
    return SchemaBook(Tokens(tokenizer, placeholder), chat, mode)


class CacheBase:
    """Schemas of a book, and what of them is encoded."""

    def __init__(self, book: SchemaBook) -> None:
        self._book = book

    def messages(self, name: str) -> list[Message]:
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

    def plan(self, prompt: PromptGiven, **options: Unpack[PromptOptions]) -> PromptPlan:
        """Plan the calls that `decode` would make; raises as it does."""
        return self._book.asked(prompt, options).plan
