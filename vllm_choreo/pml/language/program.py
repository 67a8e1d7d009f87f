# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts as Python programs; what comes out are the trees that markup makes.

    @module
    def plan(days=param(5)):
        yield "I have "
        yield days
        yield union(tokyo, rome)

    @schema
    def travel():
        yield system("You plan trips.")
        yield user(plan)

    prompt(travel, use(plan, use(tokyo), days="a week"), user("What do I see first?"))

A module is a function that yields, or returns, what it holds; its name is the function's, and its
arguments are its parameters. White space in strings is text.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TypeAlias, overload

from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.branches import Program
from vllm_choreo.pml.language.checks import check_prompt, check_schema
from vllm_choreo.pml.language.tree import (
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

Item: TypeAlias = str | MarkupNode | Program | None
Content = Callable[..., Item | Iterable[Item]]


@overload
def module(content: Content, /) -> Module: ...
@overload
def module(*, name: str | None = None, cache: bool = True) -> Callable[[Content], Module]: ...
def module(
    content: Content | None = None, /, *, name: str | None = None, cache: bool = True
) -> Module | Callable[[Content], Module]:
    """Make a function a module, as a decorator.

    Args:
        name: its name; None: the function's.
        cache: whether it is encoded once, or with each prompt.

    Raises:
        PmlError: what it yields is nothing that a module holds.
    """

    def made(content: Content) -> Module:
        params = _params(content)
        return Module(_items(content(**params)), name=name or content.__name__, cache=cache)

    return made if content is None else made(content)


@overload
def schema(content: Content, /) -> Schema: ...
@overload
def schema(*, name: str | None = None) -> Callable[[Content], Schema]: ...
def schema(
    content: Content | None = None, /, *, name: str | None = None
) -> Schema | Callable[[Content], Schema]:
    """Make a function a schema, as a decorator.

    Raises:
        PmlError: what it yields is no schema.
    """

    def made(content: Content) -> Schema:
        return check_schema(Schema(_items(content()), name=name or content.__name__))

    return made if content is None else made(content)


def program(function: Callable[..., Iterable[Item]]) -> Program:
    """Make a function with `if` and `match` a module, as a decorator; see `branches`.

    Raises:
        PmlError: a branch depends on an argument otherwise than by its truth or its value.
    """
    return Program(function, _items)


def param(length: int, scaffold: str = "") -> Param:
    """Make a parameter, as the default of a module's argument; see `Param`."""
    return Param("", length, scaffold)


def union(*modules: Module, scaffold: Module | str = "") -> Union:
    """Make a union: modules of which a prompt takes one at most.

    Args:
        scaffold: the one that stands in for the union, see `Union`.
    """
    name = scaffold if isinstance(scaffold, str) else scaffold.name
    return Union(_items(modules), scaffold=name)


def scaffold(*modules: str) -> Scaffold:
    """Make a scaffold: modules, by their paths, that are also encoded together."""
    return Scaffold(modules)


def system(*content: Item) -> Turn:
    """Make a system turn."""
    return Turn(_items(content), role="system")


def user(*content: Item) -> Turn:
    """Make a user turn."""
    return Turn(_items(content), role="user")


def assistant(*content: Item) -> Turn:
    """Make an assistant turn. Last in a prompt, it is how the answer begins."""
    return Turn(_items(content), role="assistant")


def use(module: Module | str, /, *content: Item, **arguments: str) -> Use:
    """Take a module in a prompt, with those inside it, new text, and its arguments."""
    name = module if isinstance(module, str) else module.name
    return Use(_items(content, in_prompt=True), name=name, arguments=tuple(arguments.items()))


def message(name: str) -> Passed:
    """Name a message that is passed when the prompt is run."""
    return Passed(name)


def prompt(schema: Schema | str, /, *content: Item) -> Prompt:
    """Make a prompt; a module without arguments may stand for its use.

    Raises:
        PmlError: it is no prompt.
    """
    name = schema if isinstance(schema, str) else schema.name
    return check_prompt(Prompt(_items(content, in_prompt=True), schema=name))


def _items(content: Item | Iterable[Item], in_prompt: bool = False) -> tuple[MarkupNode, ...]:
    if isinstance(content, str) or not isinstance(content, Iterable):
        content = (content,)
    made: list[MarkupNode] = []
    for item in content:
        if isinstance(item, Program):
            item = item() if in_prompt else item.module
        if isinstance(item, str):
            made.append(Text(item))
        elif isinstance(item, Module) and in_prompt:
            made.append(Use(name=item.name))
        elif isinstance(item, (Text, Module, Param, Union, Turn, Scaffold, Use, Passed, Prompt)):
            made.append(item)
        elif item is not None:
            raise PmlError(
                "text, modules, unions, parameters and turns are needed",
                parameter="content",
                value=item,
            )
    return tuple(made)


def _params(content: Content) -> dict[str, Param]:
    """Parameters of a module, named as the function's arguments."""
    params = {}
    for name, argument in inspect.signature(content).parameters.items():
        if not isinstance(argument.default, Param):
            raise PmlError("an argument of a module has the default param(length)", parameter=name)
        params[name] = dataclasses.replace(argument.default, name=name)
    return params
