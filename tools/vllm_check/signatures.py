# SPDX-License-Identifier: Apache-2.0
"""Does a call fit a function, and does an overriding method take what the overridden one takes?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tools.vllm_check.source_tree import Class, Function, SourceTree


@dataclass(frozen=True)
class Signature:
    """Parameters without `self`.

    Attributes:
        positional: those that can be given by position, in order.
        required: those without a default, by position or by name.
        keyword_only: by name alone.
    """

    positional: tuple[str, ...]
    required: frozenset[str]
    keyword_only: tuple[str, ...] = ()
    has_varargs: bool = False
    has_kwargs: bool = False

    @property
    def names(self) -> set[str]:
        return {*self.positional, *self.keyword_only}


def kind(function: Function) -> str:
    """`staticmethod`, `classmethod`, `property` or `method`."""
    decorators = [ast.unparse(d).rpartition(".")[2] for d in function.decorator_list]
    for found in ("staticmethod", "classmethod"):
        if found in decorators:
            return found
    return "property" if {"property", "cached_property"} & set(decorators) else "method"


def signature(function: Function, is_method: bool) -> Signature:
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    if is_method and kind(function) != "staticmethod":
        positional, required = positional[1:], required[1:]
    keyword_only = [a.arg for a in arguments.kwonlyargs]
    required += [
        name
        for name, default in zip(keyword_only, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return Signature(
        tuple(positional),
        frozenset(required),
        tuple(keyword_only),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def constructor(tree: SourceTree, cls: Class) -> Signature | None:
    """Of a class: of its `__init__` or, for classes made of fields, of these; None: not known."""
    order = tree.linear(cls)
    for each in order:
        for name in ("__init__", "__new__"):
            if name in each.methods:
                return signature(each.methods[name], is_method=True)
    fields = {name: node for each in reversed(order) for name, node in each.fields.items()}
    # What a field without default looks like varies (pydantic, msgspec, dataclasses): the names
    # alone are checked.
    names = [n for n, node in fields.items() if "ClassVar" not in ast.unparse(node.annotation)]
    if not names or (tree.has_foreign_base(cls) and not _is_struct(tree, cls)):
        return None
    return Signature(tuple(names), frozenset())


def _is_struct(tree: SourceTree, cls: Class) -> bool:
    bases = {ast.unparse(base) for each in tree.linear(cls) for base in each.node.bases}
    return bool(bases & {"msgspec.Struct", "PydanticMsgspecMixin", "BaseModel", "OpenAIBaseModel"})


def misfits(call: ast.Call, target: Signature) -> Iterator[str]:
    """Why a call cannot be made."""
    given = [a for a in call.args if not isinstance(a, ast.Starred)]
    has_star = len(given) < len(call.args)
    names = {k.arg for k in call.keywords if k.arg is not None}
    has_double_star = any(k.arg is None for k in call.keywords)
    if len(given) > len(target.positional) and not target.has_varargs:
        yield f"takes {len(target.positional)} arguments by position, is given {len(given)}"
    for name in sorted(names - target.names):
        if not target.has_kwargs:
            yield f"has no parameter {name!r}"
    if has_star or has_double_star:
        return
    missing = target.required - names - set(target.positional[: len(given)])
    if missing:
        yield f"needs {', '.join(sorted(missing))}"


def cannot_stand_in(ours: Function, theirs: Function, most_by_position: int) -> Iterator[str]:
    """Why vLLM's calls of its method may fail on ours.

    Args:
        most_by_position: as many arguments as vLLM ever gives by position, not by name.
    """
    if kind(ours) != kind(theirs):
        yield f"is a {kind(theirs)} there and a {kind(ours)} here"
        return
    mine, other = signature(ours, True), signature(theirs, True)
    for place, name in enumerate(other.positional):
        if place < len(mine.positional):
            here = mine.positional[place]
            if here != name and not name.startswith("_"):
                yield f"parameter {place + 1} is {name!r} there and {here!r} here"
            if here in mine.required and name not in other.required:
                yield f"may be called without {name!r} there"
        elif not mine.has_varargs and place < most_by_position:
            yield f"is given {name!r} by position there"
        elif not mine.has_kwargs and name not in mine.names:
            yield f"has the parameter {name!r} there"
    for name in other.keyword_only:
        if name not in mine.names and not mine.has_kwargs:
            yield f"has the keyword {name!r} there"
    if other.has_varargs and not mine.has_varargs:
        yield "takes any arguments by position there"
    if other.has_kwargs and not mine.has_kwargs:
        yield "takes any keywords there"
    matched = {*other.names, *mine.positional[: len(other.positional)]}
    for name in sorted(mine.required - matched):
        yield f"is called without {name!r} there"
