# SPDX-License-Identifier: Apache-2.0
"""Trees as markup: what `markup.parse` reads back as the same trees."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_choreo.pml.language.checks import check_prompt, check_schema
from vllm_choreo.pml.language.elements import SPACE_ATTRIBUTE
from vllm_choreo.pml.language.tree import (
    Document,
    MarkupNode,
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

# A line break that is written as one stays one only in text; carriage returns nowhere.
_IN_TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"})
_IN_ATTRIBUTE = _IN_TEXT | str.maketrans({'"': "&quot;", "\n": "&#10;", "\t": "&#9;"})


def to_markup(tree: Document) -> str:
    """Write a schema or a prompt as markup; nothing is indented, for white space is text.

    Raises:
        PmlError: it is none, or cannot be written.
    """
    tree = check_prompt(tree) if isinstance(tree, Prompt) else check_schema(tree)
    return "".join(_written(tree, {SPACE_ATTRIBUTE: "preserve"})) + "\n"


def _written(node: MarkupNode, more: dict[str, str] | None = None) -> Iterator[str]:
    if isinstance(node, Text):
        yield node.text.translate(_IN_TEXT)
        return
    tag, attributes = _head(node)
    given = "".join(
        f' {name}="{value.translate(_IN_ATTRIBUTE)}"'
        for name, value in (attributes | (more or {})).items()
    )
    children = getattr(node, "children", ())
    if not children:
        yield f"<{tag}{given}/>"
        return
    yield f"<{tag}{given}>"
    for child in children:
        yield from _written(child)
    yield f"</{tag}>"


def _head(node: MarkupNode) -> tuple[str, dict[str, str]]:
    """Name and attributes of an element."""
    if isinstance(node, Schema):
        return "schema", {"name": node.name}
    if isinstance(node, Module):
        return "module", {"name": node.name} | ({} if node.cache else {"cache": "false"})
    if isinstance(node, Union):
        return "union", {"scaffold": node.scaffold} if node.scaffold else {}
    if isinstance(node, Turn):
        return node.role, {}
    if isinstance(node, Param):
        scaffold = {"scaffold": node.scaffold} if node.scaffold else {}
        return "param", {"name": node.name, "len": str(node.length), **scaffold}
    if isinstance(node, Scaffold):
        return "scaffold", {"modules": " ".join(node.modules)}
    if isinstance(node, Prompt):
        return "prompt", {"schema": node.schema}
    if isinstance(node, Passed):
        return "message", {"name": node.name}
    assert isinstance(node, Use)
    return node.name, dict(node.arguments)
