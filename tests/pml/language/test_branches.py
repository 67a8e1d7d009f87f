# SPDX-License-Identifier: Apache-2.0
"""Functions with branches as modules: a prompt says what an ordinary run of its function yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from tests.pml.trees import Words
from vllm_choreo import pml
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import Tokens
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import SchemaBook
from vllm_choreo.pml.language.tree import Module, Param, Schema, Text, Union

OUTSIDE = " t40 "
NUMBERS = ("t50 ", "t51 ")
DAYS = pml.param(2)


def trip(abroad: Any = False, city: Any = "", days: Any = DAYS, hot: Any = True) -> Iterator[Any]:
    """All that branches may do."""
    loud = "t3 "
    yield loud
    yield days
    if abroad:
        yield "t4 "
        if city == "rome":
            yield "t5 "
        elif not hot:
            yield "t6 "
            yield days
        else:
            yield "t7 "
    for number in NUMBERS:
        yield number
        if hot:
            yield OUTSIDE
    match city:
        case "rome" | "oslo":
            yield "t8 "
        case "St. John's":
            yield "t9 "
        case _:
            yield "t10 "
    if OUTSIDE:
        yield "t11 "
    if city != "rome":
        pass
    else:
        yield "t12 "


def book(program: Any) -> SchemaBook:
    words = Words()
    made = SchemaBook(Tokens(words), ChatTemplate(words))
    made.register(Schema((program.module,), name="s"))
    return made


def tokens(made: SchemaBook, plan: Any) -> list[int]:
    """Tokens that the last call of a plan reads, and its own, in order."""
    found: list[int] = []
    for part in plan.parts:
        if isinstance(part.source, EncodingKey):
            ids = made.named("s").segment(part.source).token_ids
            found += ids[part.start or 0 : part.stop if part.stop is not None else len(ids)]
        else:
            found += plan.calls[part.source].token_ids
    return [*found, *plan.header.token_ids]


@pytest.mark.parametrize(
    ("abroad", "city", "hot"),
    list(product((False, True, "yes"), ("", "rome", "oslo", "St. John's", "else"), (False, True))),
)
def test_a_prompt_says_what_the_function_yields(abroad: Any, city: str, hot: bool) -> None:
    """The oracle is the function, run as it stands."""
    program = pml.program(trip)
    made = book(program)
    given = {"abroad": abroad, "city": city, "hot": hot}
    asked = pml.prompt("s", program(**given, days="t20 t21"), "t30")
    plan = made.asked(asked, {"layout": "compact"}).plan
    text = "".join(trip(**given, days="t20 t21 ")) + "t30"
    assert tokens(made, plan) == Words().encode(text)


def test_branches_are_modules_and_exclusive_ones_a_union() -> None:
    module = pml.program(trip).module
    kinds = [type(child) for child in module.children]
    names = [[m.name for m in c.children] for c in module.children if isinstance(c, Union)]
    assert names == [["rome-or-oslo", "St.-John-s", "no-rome-or-oslo"], ["not-rome", "no-not-rome"]]
    alone = [child.name for child in module.children if isinstance(child, Module)]
    assert alone == ["abroad", "hot", "hot.2"] and kinds[0] is Text
    (abroad,) = (child for child in module.children if getattr(child, "name", "") == "abroad")
    (inner,) = (child for child in abroad.children if isinstance(child, Union))
    assert [m.name for m in inner.children] == ["rome", "not-hot", "no-rome"]
    assert [c for c in inner.children[1].children if isinstance(c, Param)] == [Param("days", 2)]
    assert pml.parse_schema(pml.to_markup(Schema((module,), name="s"))).children[0] == module


def test_a_closure_and_a_default_are_the_functions_own() -> None:
    word = "t7 "

    @pml.program
    def inner(polite: Any = True) -> Iterator[Any]:
        if polite:
            yield word

    assert inner().children and not inner(polite=False).children
    assert inner.module.children[0].children == (Text("t7 "),)
    with pytest.raises(PmlError, match="arguments of inner are polite"):
        inner(rude=True)
    with pytest.raises(PmlError, match=r"text is needed \(days=3\)"):
        pml.program(trip)(days=3)


def _printed(x: Any = "") -> Iterator[Any]:
    yield f"{x}"


def _compared(x: Any = 0) -> Iterator[Any]:
    if x > 3:
        yield "t3"


def _both(x: Any = "", y: Any = "") -> Iterator[Any]:
    if x and y:
        yield "t3"


def _guarded(x: Any = "") -> Iterator[Any]:
    match x:
        case "a" if OUTSIDE:
            yield "t3"


def _captured(x: Any = "") -> Iterator[Any]:
    match x:
        case "a":
            yield "t3"
        case other:
            yield other


def _needed(x: Any) -> Iterator[Any]:
    yield "t3"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_printed, r"line 2 .*`if x`.*\(x\)|line 2 of the function"),
        (_compared, "line 2 of the function"),
        (_both, "line 2 of the function"),
        (_guarded, "line 3 of the function"),
        (_captured, "line 5 of the function"),
        (_needed, "has a default"),
    ],
)
def test_what_no_branch_can_be(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(PmlError, match=said):
        pml.program(function)


def test_a_function_without_its_source() -> None:
    names: dict[str, Any] = {}
    exec("def f(x=1):\n    yield 't3'", names)
    with pytest.raises(PmlError, match="write it in a file"):
        pml.program(names["f"])
