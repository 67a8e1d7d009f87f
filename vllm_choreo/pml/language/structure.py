# SPDX-License-Identifier: Apache-2.0
"""Check of schemas and prompts without a model: all but what depends on its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import ChatTokenizer, Tokens
from vllm_choreo.pml.language.schema_book import SchemaBook
from vllm_choreo.pml.language.tree import Document, MarkupNode, Passed, Prompt, Schema, Text


class TextAsToken:
    """A stand-in for a tokenizer: any text is one token, and any conversation has a template."""

    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode any text as one token."""
        return [1]

    def apply_chat_template(
        self,
        turns: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = False,
        **options: object,
    ) -> str:
        """Render turns, each of which begins with its role."""
        text = "".join(f"[{turn['role']}]{turn['content']}" for turn in turns)
        return text + "[assistant]" * add_generation_prompt


def check_documents(
    documents: Sequence[Document], tokenizer: ChatTokenizer | None = None
) -> SchemaBook:
    """Register the schemas and plan the prompts.

    Args:
        documents: prompts may stand before their schemas.
        tokenizer: tokenizer of the model whose tokens are to be checked, too.

    Returns:
        A book with the schemas.

    Raises:
        ChoreoError: the first thing that is wrong.
    """
    known = tokenizer or TextAsToken()
    book = SchemaBook(Tokens(known), ChatTemplate(known))
    names: set[str] = set()
    for schema in (d for d in documents if isinstance(d, Schema)):
        if schema.name in names:
            raise PmlError(
                "there are two schemas of this name", parameter="schema", value=schema.name
            )
        names.add(schema.name)
        book.register(schema)
    for prompt in (d for d in documents if isinstance(d, Prompt)):
        # Of what is passed at run time no length is known, and gaps are nothing without a model.
        layout = "compact" if tokenizer is None else _layout(prompt)
        book.asked(prompt, {"layout": layout, "messages": dict.fromkeys(passed_names(prompt))})
    return book


def passed_names(prompt: MarkupNode) -> Iterator[str]:
    """Names of the messages that a prompt expects to be passed."""
    for child in getattr(prompt, "children", ()):
        if isinstance(child, Passed):
            yield child.name
        yield from passed_names(child)


def num_new_chars(prompt: MarkupNode) -> int:
    """Number of characters of text that a prompt brings, those of arguments included."""
    own = sum(len(value) for _, value in getattr(prompt, "arguments", ()))
    own += len(prompt.text) if isinstance(prompt, Text) else 0
    return own + sum(map(num_new_chars, getattr(prompt, "children", ())))


def _layout(prompt: Prompt) -> str:
    return "compact" if any(passed_names(prompt)) else "schema"
