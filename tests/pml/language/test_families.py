# SPDX-License-Identifier: Apache-2.0
"""Schemas of all shapes under the templates of six families, against what the templates write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES, tokenizer_of
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import Tokens
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import SchemaBook

S, U, A = "system", "user", "assistant"
SHAPES: tuple[tuple[str, ...], ...] = (
    (S,),
    (U,),
    (S, U),
    (U, A),
    (S, U, A),
    (U, A, U),
    (S, U, A, U),
    (U, A, U, A),
    (S, U, A, U, A),
)
TEXTS = ("one", "two", "three", "four", "five")


def _book(family: str) -> SchemaBook:
    tokenizer = tokenizer_of(family)
    return SchemaBook(Tokens(tokenizer), ChatTemplate(tokenizer))


def _schema(shape: tuple[str, ...]) -> str:
    turns = "".join(f"<{r}>{t}</{r}>" for r, t in zip(shape, TEXTS, strict=False))
    return f'<schema name="s">{turns}</schema>'


def _text(made: SchemaBook, family: str, plan: Any) -> str:
    """The text that a plan's last call reads and says, in order."""

    def tokens() -> Iterator[int]:
        for part in plan.parts:
            if isinstance(part.source, EncodingKey):
                laid = made.schemas["s"].layout.root
                (segment,) = (s for s in laid.segments if s.index == part.source.number)
                yield from segment.token_ids
            else:
                yield from plan.calls[part.source].token_ids
        yield from plan.header.token_ids

    return str(tokenizer_of(family).decode(list(tokens())))


def _conversation(shape: tuple[str, ...]) -> list[dict[str, str]]:
    turns = [{"role": r, "content": t} for r, t in zip(shape, TEXTS, strict=False)]
    return [*turns, {"role": U, "content": "ask"}]


def _is_written(family: str, chat: list[dict[str, str]]) -> str | None:
    """The oracle: what the template writes, unless it refuses the chat or moves what is said."""
    try:
        text = tokenizer_of(family).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None
    places = [text.find(turn["content"]) for turn in chat]
    return text if places == sorted(places) and min(places) >= 0 else None


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(shape))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_template_writes(family: str, shape: tuple[str, ...]) -> None:
    made = _book(family)
    made.register(_schema(shape))
    plan = made.asked('<prompt schema="s"><user>ask</user></prompt>', {}).plan
    written = _is_written(family, _conversation(shape))
    text = _text(made, family, plan)
    if written is not None:
        assert text == written
    else:
        assert family in ("mistral", "gemma"), "the others write every one of these"
        places = [text.index(turn["content"]) for turn in _conversation(shape)]
        assert places == sorted(places)
        assert all(text.count(turn["content"]) == 1 for turn in _conversation(shape))


@pytest.mark.parametrize(
    ("shape", "written"),
    [
        ((S,), "<s>[INST] one\n\nask[/INST]"),
        ((U,), "<s>[INST] one[/INST][INST] ask[/INST]"),
        ((S, U), "<s>[INST] one\n\ntwo[/INST][INST] ask[/INST]"),
        ((U, A), "<s>[INST] one[/INST] two</s>[INST] ask[/INST]"),
        ((S, U, A), "<s>[INST] one\n\ntwo[/INST] three</s>[INST] ask[/INST]"),
        (
            (S, U, A, U, A),
            "<s>[INST] one\n\ntwo[/INST] three</s>[INST] four[/INST] five</s>[INST] ask[/INST]",
        ),
    ],
)
def test_turns_of_mistral_stand_where_the_schema_has_them(
    shape: tuple[str, ...], written: str
) -> None:
    """Its template would move the system's text, and refuses two turns of the user in a row."""
    made = _book("mistral")
    made.register(_schema(shape))
    plan = made.asked('<prompt schema="s"><user>ask</user></prompt>', {}).plan
    assert _text(made, "mistral", plan) == written


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_begins_as_the_prompt_says(family: str) -> None:
    made = _book(family)
    made.register(_schema((U, A)))
    prompt = '<prompt schema="s"><user>ask</user><assistant>It is</assistant></prompt>'
    text = _text(made, family, made.asked(prompt, {}).plan)
    assert text.endswith("It is") and text.index("ask") < text.index("It is")
