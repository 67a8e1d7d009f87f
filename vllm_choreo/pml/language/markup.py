# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts from markup. `printer` is the way back.

    <schema name="travel">                            <prompt schema="travel">
      <system>You plan trips.</system>                  <plan days="a week"><tokyo/></plan>
      <user>                                            <user>What do I see first?</user>
        <module name="plan">                          </prompt>
          I have <param name="days" len="5"/>.
          <union>
            <module name="tokyo">…</module>
            <module name="rome">…</module>
          </union>
        </module>
      </user>
      <scaffold modules="plan plan/tokyo"/>
    </schema>

A file may hold several of both inside `<pml>`. `<parameter name length>` is `<param name len>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.checks import check_prompt, check_schema
from vllm_choreo.pml.language.elements import Element, read_element
from vllm_choreo.pml.language.sources import read_sources
from vllm_choreo.pml.language.tree import (
    ROLES,
    Document,
    MarkupNode,
    Module,
    Param,
    Passed,
    Place,
    Prompt,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    Use,
    wrong,
)


def parse(markup: str, sources: Path | None = None) -> list[Document]:
    """Read the schemas and prompts of a text: its one outermost element, or those inside `<pml>`.

    Args:
        sources: folder below which modules may name files, see `sources.py`; None: none may.

    Raises:
        PmlError: what is wrong, with line and column.
    """
    root = read_element(markup, "markup")
    read_sources(root, sources)
    if root.tag != "pml":
        return [_document(root)]
    _attributes(root, ())
    found = []
    for child in root.content(has_edges=True):
        if isinstance(child, tuple):
            if child[0].strip():
                raise wrong("text stands inside a schema or a prompt", child[1], "markup")
        else:
            found.append(_document(child))
    return found


def parse_schema(markup: str, sources: Path | None = None) -> Schema:
    """Read the schema of a text.

    Args:
        sources: as `parse` takes it.

    Raises:
        PmlError: there is none, or as `parse`.
    """
    root = read_element(markup, "schema")
    read_sources(root, sources)
    if root.tag != "schema":
        raise wrong("a schema begins with <schema name=…>", root.place, "schema", root.tag)
    return _schema(root)


def parse_prompt(markup: str) -> Prompt:
    """Read the prompt of a text.

    Raises:
        PmlError: there is none, or as `parse`.
    """
    root = read_element(markup, "prompt")
    if root.tag != "prompt":
        raise wrong("a prompt begins with <prompt schema=…>", root.place, "prompt", root.tag)
    return check_prompt(_prompt(root))


def _document(root: Element) -> Document:
    if root.tag == "schema":
        return _schema(root)
    if root.tag == "prompt":
        return check_prompt(_prompt(root))
    raise wrong("a schema or a prompt is needed here", root.place, "markup", root.tag)


# -- schemas -------------------------------------------------------------------------------------


def _schema(element: Element) -> Schema:
    name = _needed(element, "name", ("name",))
    children = tuple(_schema_items(element, has_edges=True))
    return check_schema(Schema(children, name=name, place=element.place))


def _schema_items(element: Element, has_edges: bool = False) -> Iterator[MarkupNode]:
    for child in element.content(has_edges):
        yield _text(child) if isinstance(child, tuple) else _schema_item(child)


def _schema_item(element: Element) -> MarkupNode:
    place = element.place
    if element.tag in ROLES:
        _attributes(element, ())
        children = tuple(_schema_items(element, has_edges=True))
        return Turn(children, role=element.tag, place=place)
    if element.tag == "module":
        return _module(element)
    if element.tag == "union":
        _attributes(element, ("scaffold",))
        stand_in = element.attributes.get("scaffold", "")
        return Union(tuple(_members(element)), scaffold=stand_in, place=place)
    if element.tag in ("param", "parameter"):
        return _param(element)
    if element.tag == "scaffold":
        paths = _needed(element, "modules", ("modules",))
        _empty(element)
        return Scaffold(tuple(paths.split()), place=place)
    raise _unknown(element, "schema", (*ROLES, "module", "union", "param", "scaffold"))


def _module(element: Element) -> Module:
    name = _needed(element, "name", ("name", "cache"))
    cache = element.attributes.get("cache", "true")
    if cache not in ("true", "false"):
        raise wrong('cache is "true" or "false"', element.place, "cache", cache)
    children = tuple(_schema_items(element))
    return Module(children, name=name, cache=cache == "true", place=element.place)


def _members(element: Element) -> Iterator[MarkupNode]:
    for item in _schema_items(element, has_edges=True):
        # Spaces between members are nobody's text.
        if not isinstance(item, Text) or item.text.strip():
            yield item


def _param(element: Element) -> Param:
    names = ("len", "length")
    name = _needed(element, "name", ("name", *names, "scaffold"))
    _empty(element)
    given = [element.attributes[key] for key in names if key in element.attributes]
    if len(given) != 1:
        raise wrong("a parameter needs its length in tokens, len=…", element.place, "len", name)
    (length,) = given
    if not (length.strip().isascii() and length.strip().isdecimal() and len(length) < 20):
        raise wrong("the length of a parameter is a number of tokens", element.place, "len", length)
    scaffold = element.attributes.get("scaffold", "")
    return Param(name, int(length), scaffold, place=element.place)


# -- prompts -------------------------------------------------------------------------------------


def _prompt(element: Element) -> Prompt:
    schema = _needed(element, "schema", ("schema",))
    return Prompt(tuple(_prompt_items(element, True)), schema=schema, place=element.place)


def _prompt_items(element: Element, has_edges: bool = False) -> Iterator[MarkupNode]:
    for child in element.content(has_edges):
        if not isinstance(child, tuple):
            yield _prompt_item(child)
        elif child[0].strip() or element.tag in ROLES or element.keeps_space:
            yield _text(child)


def _prompt_item(element: Element) -> MarkupNode:
    place = element.place
    if element.tag in ROLES:
        _attributes(element, ())
        return Turn(tuple(_prompt_items(element, True)), role=element.tag, place=place)
    if element.tag == "message":
        name = _needed(element, "name", ("name",))
        _empty(element)
        return Passed(name, place=place)
    if element.tag == "prompt":
        return _prompt(element)
    arguments = tuple(element.attributes.items())
    children = tuple(_prompt_items(element))
    return Use(children, name=element.tag, arguments=arguments, place=place)


# -- elements ------------------------------------------------------------------------------------


def _text(child: tuple[str, Place]) -> Text:
    return Text(child[0], place=child[1])


def _attributes(element: Element, known: tuple[str, ...], advice: str = "") -> None:
    for name in element.attributes:
        if name not in known:
            has = f"has the attributes {', '.join(known)}" if known else "has no attributes"
            text = f"<{element.tag}> {has}"
            raise wrong(f"{text}; {advice}" if advice else text, element.place, element.tag, name)


def _needed(element: Element, name: str, known: tuple[str, ...]) -> str:
    _attributes(element, known)
    if name not in element.attributes:
        raise wrong(f"<{element.tag}> needs the attribute {name}", element.place, element.tag, name)
    return element.attributes[name]


def _empty(element: Element) -> None:
    if element.children:
        raise wrong(f"<{element.tag}/> holds nothing", element.place, element.tag)


def _unknown(element: Element, parameter: str, known: tuple[str, ...]) -> PmlError:
    return wrong(
        f"unknown element; there are {', '.join(known)}; write &lt; for a < in text",
        element.place,
        parameter,
        element.tag,
    )
