# SPDX-License-Identifier: Apache-2.0
"""Random schemas and prompts that fit them, for hypothesis; and a tokenizer of words."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from vllm_choreo.pml.language.checks import child_modules, own_items
from vllm_choreo.pml.language.tree import (
    ROLES,
    Module,
    Param,
    Passed,
    Prompt,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    Use,
)

NAMES = ("a", "b", "c", "unit.py", "d-1", "_e")
# Whatever XML can hold, what it treats in its own way more often.
ANY_TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\t\r<>&\"']"),
        st.characters(exclude_categories=("Cs", "Cc", "Cn"), exclude_characters="\ufffe\uffff"),
    ),
    min_size=1,
    max_size=20,
)
WORDS = st.lists(st.integers(3, 480), min_size=1, max_size=9).map(
    lambda ids: "".join(f" t{i}" for i in ids) + " "
)


class Words:
    """A tokenizer of the words t0 … t511, with a chat template that adds words."""

    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word[1:]) if re.fullmatch(r"t\d+", word) else 0 for word in text.split()]

    def apply_chat_template(
        self, turns: Any, tokenize: bool, add_generation_prompt: bool, **_: Any
    ) -> str:
        text = "".join(
            f" t{490 + ROLES.index(turn['role'])} {turn['content']} t499 " for turn in turns
        )
        return text + (" t492 " if add_generation_prompt else "")


@st.composite
def schemas(draw: Any, texts: Any = WORDS, turns: bool = True) -> Schema:
    """A schema of up to three levels."""
    children = draw(_contents(texts, depth=2, in_module=False, turns=turns))
    schema = Schema(tuple(children), name=draw(st.sampled_from(("s", "other"))))
    paths = _paths(schema, ())
    if len(paths) >= 2 and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(paths), min_size=2, max_size=3, unique=True))
        if _may_be_chosen(schema, chosen):
            schema = Schema((*children, Scaffold(tuple(chosen))), name=schema.name)
    return schema


@st.composite
def _contents(draw: Any, texts: Any, depth: int, in_module: bool, turns: bool) -> list[Any]:
    names = list(draw(st.permutations(NAMES)))
    kinds = ["text", "text"] + ["param"] * in_module + ["module", "union"] * (depth > 0)
    kinds += ["turn"] * turns
    made = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5)):
        if kind == "turn":
            inner = [Text(draw(texts))]
            if depth and names:
                inner.append(draw(_module(texts, names.pop(), depth - 1, False)))
            made.append(Turn(tuple(inner), role=draw(st.sampled_from(ROLES))))
        elif kind == "module" and names:
            made.append(draw(_module(texts, names.pop(), depth - 1, turns)))
        elif kind == "union" and len(names) >= 2:
            members = [
                draw(_module(texts, names.pop(), depth - 1, turns))
                for _ in range(draw(st.integers(1, 2)))
            ]
            made.append(Union(tuple(members)))
        elif kind == "param":
            made.append(Param(f"p{len(made)}", draw(st.integers(1, 6))))
        else:
            made.append(Text(draw(texts)))
    return made


@st.composite
def _module(draw: Any, texts: Any, name: str, depth: int, turns: bool) -> Module:
    children = draw(_contents(texts, depth, True, turns))
    return Module(tuple(children), name=name, cache=draw(st.sampled_from((True, True, False))))


def _paths(owner: Any, path: tuple[str, ...]) -> list[str]:
    found = []
    for module in child_modules(owner):
        if module.cache:
            inner = (*path, module.name)
            found += ["/".join(inner), *_paths(module, inner)]
    return found


def _may_be_chosen(schema: Schema, paths: list[str]) -> bool:
    taken: dict[int, str] = {}
    for path in paths:
        owner: Any = schema
        for name in path.split("/"):
            for union in own_items(owner):
                is_member = isinstance(union, Union) and any(m.name == name for m in union.children)
                if is_member and taken.setdefault(id(union), name) != name:
                    return False
            owner = next(m for m in child_modules(owner) if m.name == name)
    return True


@st.composite
def prompts(draw: Any, schema: Schema, texts: Any = WORDS, text_among: bool = False) -> Prompt:
    """A prompt of a schema that ends with new text."""
    children = draw(_uses(schema, texts, text_among))
    closing = draw(st.sampled_from(("text", "turn")))
    last = Text(draw(texts))
    children.append(last if closing == "text" else Turn((last,), role="user"))
    return Prompt(tuple(children), schema=schema.name)


@st.composite
def _uses(draw: Any, owner: Any, texts: Any, text_among: bool) -> list[Any]:
    made: list[Any] = []
    for item in own_items(owner):
        members = item.children if isinstance(item, Union) else [item]
        members = [member for member in members if isinstance(member, Module)]
        if not members or not draw(st.booleans()):
            continue
        module = draw(st.sampled_from(members))
        params = [child for child in own_items(module) if isinstance(child, Param)]
        arguments = []
        for param in params:
            if draw(st.booleans()):
                count = draw(st.integers(0, param.length))
                ids = draw(st.lists(st.integers(3, 480), min_size=count, max_size=count))
                arguments.append((param.name, "".join(f" t{i} " for i in ids)))
        inner = draw(_uses(module, texts, text_among))
        made.append(Use(tuple(inner), name=module.name, arguments=tuple(arguments)))
        # Of a module without tokens of its own the reference does not know where it stands.
        has_tokens = any(isinstance(child, (Text, Param)) for child in own_items(module))
        if text_among and has_tokens and draw(st.booleans()):
            made.append(Text(draw(texts)))
    return made


@st.composite
def free_prompts(draw: Any) -> Prompt:
    """A prompt of no schema in particular."""
    parts = [
        Use((Text(draw(ANY_TEXT)),), name="a", arguments=(("x", draw(ANY_TEXT)), ("y", ""))),
        Passed("m"),
        Text(draw(ANY_TEXT)),
        Prompt((Text(draw(ANY_TEXT)),), schema="t"),
        Turn((Text(draw(ANY_TEXT)),), role="user"),
    ]
    last = draw(st.integers(1, len(parts)))
    return Prompt(tuple(parts[:last]), schema="s")
