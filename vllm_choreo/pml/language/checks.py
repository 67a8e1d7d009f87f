# SPDX-License-Identifier: Apache-2.0
"""Rules that make a tree a schema or a prompt: names, what may stand where, how much at most.

The same rules for markup and for programs. What only a schema can tell of a prompt, such as whether
it has the modules, is told when the prompt is planned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vllm_choreo.pml.language.tree import (
    ROLES,
    Container,
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
    wrong,
)

MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_CHARS = 8 * 2**20
MAX_PARAM_TOKENS = 100_000
MAX_TURNS = 1_000
# Modules of one scaffold, each of which reads those before it, and of all scaffolds together.
MAX_SCAFFOLD = 256
MAX_IN_SCAFFOLDS = 1024

# They are names of XML elements, so that prompts can be written.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
# Elements that prompts have anyway.
_RESERVED = frozenset((*ROLES, "prompt", "message"))
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_IN_SCHEMA: dict[type, tuple[type[MarkupNode], ...]] = {
    Schema: (Text, Module, Union, Turn, Scaffold),
    Module: (Text, Module, Union, Turn, Param),
    Union: (Module,),
}
_IN_PROMPT: dict[type, tuple[type[MarkupNode], ...]] = {
    Prompt: (Text, Use, Turn, Passed, Prompt),
    Use: (Text, Use, Passed),
    Turn: (Text, Passed),
}
_ORDER = (Use, Prompt, Turn)


def check_schema(schema: Schema) -> Schema:
    """Return the schema, if it is one.

    Raises:
        PmlError: what is wrong, and where it was written.
    """
    _check_size(schema, "schema")
    _check_name(schema.name, schema, "schema")
    if not schema.children:
        raise wrong("a schema needs text or modules", schema, "schema", schema.name)
    _check_level(schema, schema)
    _check_scaffolds(schema)
    return schema


def check_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt, if it is one.

    Raises:
        PmlError: what is wrong, and where it was written.
    """
    _check_size(prompt, "prompt")
    _check_prompt_level(prompt)
    return prompt


def own_items(owner: Container) -> Iterator[Any]:
    """Children of a module or schema, those of its turns in place of the turns."""
    for child in owner.children:
        if isinstance(child, Turn):
            yield from child.children
        else:
            yield child


def child_modules(owner: Container) -> Iterator[Module]:
    """Modules right inside a module or schema, those of its turns and unions too."""
    for child in own_items(owner):
        if isinstance(child, Module):
            yield child
        elif isinstance(child, Union):
            yield from child.children


# -- schemas -------------------------------------------------------------------------------------


def _check_level(owner: Container, allowed_in: Container, has_turns: bool = True) -> None:
    """Check all that stands in a schema or module, and below."""
    allowed = _IN_SCHEMA[type(allowed_in)]
    for child in owner.children:
        if not isinstance(child, allowed):
            raise wrong(_misplaced(child, allowed_in), child, "schema", _title(child))
        if isinstance(child, Turn):
            if not has_turns:
                raise wrong("a turn cannot stand inside a turn", child, "schema", child.role)
            _check_role(child)
            _check_level(child, allowed_in, has_turns=False)
        elif isinstance(child, Module):
            _check_module(child, has_turns)
        elif isinstance(child, Union):
            _check_union(child, has_turns)
        elif isinstance(child, Param):
            _check_param(child)
        elif isinstance(child, Text):
            _check_text(child.text, child, "schema")
    if not isinstance(owner, Turn):
        _check_unique(owner)


def _check_module(module: Module, has_turns: bool) -> None:
    _check_name(module.name, module, "module")
    if module.name in _RESERVED:
        raise wrong(
            "this name is an element of prompts: choose another", module, "module", module.name
        )
    if type(module.cache) is not bool:
        raise wrong('cache is "true" or "false"', module, "cache", module.cache)
    _check_level(module, module, has_turns)


def _check_union(union: Union, has_turns: bool) -> None:
    if not union.children:
        raise wrong("a union needs modules", union, "union")
    for member in union.children:
        if not isinstance(member, Module):
            raise wrong("a union holds modules alone", member, "union", _title(member))
        _check_module(member, has_turns)
    if union.scaffold and not any(m.name == union.scaffold and m.cache for m in union.children):
        raise wrong(
            'the scaffold of a union is one of its modules, and not one with cache="false"',
            union,
            "scaffold",
            union.scaffold,
        )


def _check_param(param: Param) -> None:
    _check_name(param.name, param, "param")
    if type(param.length) is not int or not 1 <= param.length <= MAX_PARAM_TOKENS:
        raise wrong(
            f"the length of a parameter is a number of tokens from 1 to {MAX_PARAM_TOKENS}",
            param,
            "len",
            param.length,
        )
    _check_text(param.scaffold, param, "scaffold")


def _check_unique(owner: Container) -> None:
    modules: set[str] = set()
    params: set[str] = set()
    for module in child_modules(owner):
        if module.name in modules:
            raise wrong("there is a module of this name beside it", module, "module", module.name)
        modules.add(module.name)
    for param in own_items(owner):
        if isinstance(param, Param):
            if param.name in params:
                raise wrong("the module has a parameter of this name", param, "param", param.name)
            params.add(param.name)


def _check_scaffolds(schema: Schema) -> None:
    scaffolds = [child for child in schema.children if isinstance(child, Scaffold)]
    if sum(len(scaffold.modules) for scaffold in scaffolds) > MAX_IN_SCAFFOLDS:
        raise wrong(
            f"the scaffolds of a schema name {MAX_IN_SCAFFOLDS} modules at most",
            scaffolds[-1],
            "modules",
        )
    if scaffolds:
        known = dict(_paths(schema, "", ()))
        for scaffold in scaffolds:
            _check_scaffold(scaffold, known)


# A module, whether it and all around it are cached, and which member of which unions it is.
_Known = tuple[bool, tuple[tuple[int, str], ...]]


def _paths(
    owner: Container, path: str, unions: tuple[tuple[int, str], ...]
) -> Iterator[tuple[str, _Known]]:
    """Path of every module, and what is known of it."""
    is_cached = getattr(owner, "cache", True)
    for item in own_items(owner):
        is_union = isinstance(item, Union)
        for module in item.children if is_union else (item,):
            if isinstance(module, Module):
                own = (*unions, (id(item), module.name)) if is_union else unions
                inner = f"{path}/{module.name}" if path else module.name
                yield inner, (is_cached and module.cache, own)
                for deeper, (deeper_cached, rest) in _paths(module, inner, own):
                    yield deeper, (is_cached and deeper_cached, rest)


def _check_scaffold(scaffold: Scaffold, known: dict[str, _Known]) -> None:
    if not 2 <= len(scaffold.modules) <= MAX_SCAFFOLD or len(set(scaffold.modules)) < len(
        scaffold.modules
    ):
        raise wrong(
            f"a scaffold names two to {MAX_SCAFFOLD} modules, each once", scaffold, "modules"
        )
    chosen: dict[int, str] = {}
    for path in scaffold.modules:
        if path not in known:
            raise wrong("the schema has no such module", scaffold, "modules", path)
        is_cached, unions = known[path]
        if not is_cached:
            raise wrong(
                'a module with cache="false" is encoded with each prompt, and alone',
                scaffold,
                "modules",
                path,
            )
        for union, member in unions:
            if chosen.setdefault(union, member) != member:
                raise wrong(
                    "a prompt takes one module of a union at most", scaffold, "modules", path
                )


# -- prompts -------------------------------------------------------------------------------------


def _check_prompt_level(owner: Container) -> None:
    allowed = _IN_PROMPT[type(owner)]
    if isinstance(owner, Prompt):
        _check_name(owner.schema, owner, "schema")
    latest = 0
    for child in owner.children:
        if not isinstance(child, allowed):
            raise wrong(_misplaced(child, owner), child, "prompt", _title(child))
        if isinstance(child, Text):
            _check_text(child.text, child, "prompt")
            is_new = bool(child.text.strip())
        elif is_new := isinstance(child, Passed):
            _check_name(child.name, child, "message")
        if isinstance(child, (Text, Passed)):
            if is_new and latest == _ORDER.index(Turn):
                raise wrong("after a turn, text belongs into a turn", child, "prompt")
        else:
            rank = _ORDER.index(type(child))
            if rank < latest:
                raise wrong(
                    "modules stand first, then prompts of other schemas, then turns",
                    child,
                    "prompt",
                    _title(child),
                )
            latest = rank
            assert isinstance(child, (Use, Turn, Prompt)), "`allowed` has no others"
            _check_part(child)


def _check_part(child: Use | Turn | Prompt) -> None:
    if isinstance(child, Use):
        _check_use(child)
        return
    if isinstance(child, Turn):
        _check_role(child)
    elif any(isinstance(inner, Turn) for inner in child.children):
        raise wrong("turns stand in the outermost prompt", child, "prompt", child.schema)
    _check_prompt_level(child)


def _check_use(use: Use) -> None:
    _check_name(use.name, use, "prompt")
    names = [name for name, _ in use.arguments]
    for name, value in use.arguments:
        _check_name(name, use, "prompt")
        _check_text(value, use, name)
    if len(set(names)) < len(names):
        raise wrong("an argument is given once", use, "prompt", use.name)
    _check_prompt_level(use)


# -- both ----------------------------------------------------------------------------------------


def _check_size(root: Container, parameter: str) -> None:
    """Refuse a tree that is too deep or too large, before anything walks it by recursion."""
    level, depth, num_nodes, num_chars, num_turns = [root], 0, 0, 0, 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise wrong(f"elements are nested {MAX_DEPTH} deep at most", level[0], parameter)
        num_nodes += len(level)
        num_turns += sum(isinstance(node, Turn) for node in level)
        num_chars += sum(len(n.text) for n in level if isinstance(n, Text) and type(n.text) is str)
        level = [child for node in level for child in getattr(node, "children", ())]
        if num_nodes > MAX_NODES:
            raise wrong(f"there are {MAX_NODES} elements and texts at most", root, parameter)
    if num_turns > MAX_TURNS:
        raise wrong(f"there are {MAX_TURNS} turns at most", root, parameter, num_turns)
    if num_chars > MAX_CHARS:
        raise wrong(f"there are {MAX_CHARS} characters at most", root, parameter)


def _check_name(name: object, node: MarkupNode, parameter: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            "a name is a letter or _, then up to 127 letters, digits and _ . -",
            node,
            parameter,
            name,
        )


def _check_role(turn: Turn) -> None:
    if turn.role not in ROLES:
        raise wrong(f"the role of a turn is one of {ROLES}", turn, "role", turn.role)


def _check_text(text: object, node: MarkupNode, parameter: str) -> None:
    if not isinstance(text, str):
        raise wrong("text is needed", node, parameter, text)
    if found := _NO_XML.search(text):
        raise wrong(
            f"the character U+{ord(found.group()):04X} cannot be written in XML: leave it out",
            node,
            parameter,
        )


def _misplaced(child: MarkupNode, owner: Container) -> str:
    if isinstance(child, Param) and isinstance(owner, Schema):
        return "a parameter belongs into a module: text that all prompts have takes no arguments"
    if isinstance(child, Scaffold):
        return "scaffolds stand right inside the schema"
    names = {Passed: "message", Use: "module"}
    inside, outer = (names.get(type(node), type(node).__name__.lower()) for node in (child, owner))
    return f"a {inside} cannot stand inside a {outer}"


def _title(node: MarkupNode) -> str:
    return getattr(node, "name", None) or getattr(node, "role", None) or type(node).__name__
