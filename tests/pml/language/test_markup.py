# SPDX-License-Identifier: Apache-2.0
"""Markup, trees and programs: three ways to write the same; and what is refused, where."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pml.trees import ANY_TEXT, free_prompts, schemas
from vllm_choreo import pml
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.checks import MAX_CHARS, MAX_DEPTH, MAX_NODES, check_schema
from vllm_choreo.pml.language.markup import parse, parse_prompt, parse_schema
from vllm_choreo.pml.language.printer import to_markup
from vllm_choreo.pml.language.tree import (
    Module,
    Param,
    Passed,
    Prompt,
    Schema,
    Text,
    Turn,
    Union,
    Use,
)

TRAVEL = """\
<schema name="travel">
  <system>
    You plan trips.
  </system>
  <user>
    <module name="plan">
      I have <param name="days" len="5"/> of time,
        and &lt;little&gt; money.
      <union>
        <module name="tokyo">Tokyo <!-- a comment -->is big.</module>
        <module name="rome" cache="false"> Rome </module>
      </union>
    </module>
  </user>
  <scaffold modules="plan plan/tokyo"/>
</schema>
"""


# -- the three ways ------------------------------------------------------------------------------


@given(schema=schemas(ANY_TEXT))
def test_a_schema_is_read_as_it_was_printed(schema: Schema) -> None:
    assert parse_schema(to_markup(schema)) == schema


@given(prompt=free_prompts())
def test_a_prompt_is_read_as_it_was_printed(prompt: Prompt) -> None:
    assert parse_prompt(to_markup(prompt)) == prompt


def test_a_program_makes_the_tree_of_the_markup() -> None:
    @pml.module
    def tokyo() -> Any:
        return "Tokyo is big."

    @pml.module(cache=False)
    def rome() -> Any:
        return " Rome "

    @pml.module
    def plan(days: Any = pml.param(5)) -> Any:  # noqa: B008
        yield "I have "
        yield days
        yield " of time,\nand <little> money.\n"
        yield pml.union(tokyo, rome)

    @pml.schema
    def travel() -> Any:
        yield pml.system("You plan trips.")
        yield pml.user(plan)
        yield pml.scaffold("plan", "plan/tokyo")

    assert travel == parse_schema(TRAVEL)
    assert pml.parse_schema(pml.to_markup(travel)) == travel
    prompt = pml.prompt(travel, pml.use(plan, tokyo, " by the sea", days="a week"), pml.user("Go!"))
    written = (
        '<prompt schema="travel"><plan days="a week"><tokyo/> by the sea</plan>'
        "<user>Go!</user></prompt>"
    )
    assert prompt == parse_prompt(written)
    with pytest.raises(PmlError, match="default param"):
        pml.module(lambda days: "x")
    with pytest.raises(PmlError, match="text, modules"):
        pml.module(lambda: 3)


def test_both_names_of_a_parameter_and_files_of_several() -> None:
    parameter = '<parameter name="x" length=" 3 "/>'
    text = (
        f'<pml><schema name="a"><module name="m">{parameter}</module></schema>\n'
        '<prompt schema="a">Hi</prompt></pml>'
    )
    schema, prompt = parse(text)
    assert schema == Schema((Module((Param("x", 3),), name="m"),), name="a")
    assert prompt == Prompt((Text("Hi"),), schema="a")


# -- white space ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("a  b", "a  b"),
        ("\n   a\n   b\n", "a\nb\n"),
        ("\n   def f():\n       pass\n\n   x\n  ", "def f():\n    pass\n\nx\n"),
        ("\n     a\n   b", "  a\nb"),
        ("  a  ", " a "),
        ("a\n  b\n  c", "a\nb\nc"),
        ("a&#32;\n", "a\n"),
        ("\u00a0a", "\u00a0a"),
        ("<![CDATA[ <b> & ]]>", " <b> & "),
        ("a<!-- - -->b", "ab"),
    ],
)
def test_white_space_at_the_ends_of_texts(written: str, text: str) -> None:
    schema = parse_schema(f'<schema name="s"><module name="m">{written}</module></schema>')
    assert schema.children == (Module((Text(text),), name="m"),)


def test_white_space_among_elements_and_at_edges() -> None:
    schema = parse_schema(
        '<schema name="s">\n  <user>  Hi <module name="a">x</module> <module name="b">y</module>\n'
        '  <module name="c">z</module> \n </user>\n  End.\n</schema>'
    )
    a, b, c = (Module((Text(t),), name=n) for n, t in (("a", "x"), ("b", "y"), ("c", "z")))
    assert schema.children == (Turn((Text("Hi "), a, Text(" "), b, c), role="user"), Text("End."))
    kept = parse_schema('<schema name="s" xml:space="preserve"> <user> x </user>\n</schema>')
    assert kept.children == (Text(" "), Turn((Text(" x "),), role="user"), Text("\n"))
    prompt = parse_prompt('<prompt schema="s">\n <a/> <b> </b> What? <message name="m"/> </prompt>')
    assert prompt.children == (Use(name="a"), Use(name="b"), Text(" What? "), Passed("m"))


# -- what is refused -----------------------------------------------------------------------------

_BAD = {
    "": (1, 1),
    "<schema": (1, 1),
    '<schema name="s">x</schema><a/>': (1, 28),
    '<!DOCTYPE s [<!ENTITY a "x">]><schema name="s">&a;</schema>': (1, 13),
    '<!DOCTYPE s SYSTEM "file:///etc/passwd"><schema name="s">x</schema>': (1, 40),
    '<schema name="s">&unknown;</schema>': (1, 18),
    '<schema name="s"><?php x?>y</schema>': (1, 18),
    '<schema name="s">\n  <b>x</b></schema>': (2, 3),
    '<schema name="s">é<module name="user">x</module></schema>': (1, 19),
    '<schema name="s"><module name="1a">x</module></schema>': (1, 18),
    '<schema name="s"><module>x</module></schema>': (1, 18),
    '<schema name="s"><module name="a" src="a.txt"/></schema>': (1, 18),
    '<schema name="s"><module name="a" cache="no">x</module></schema>': (1, 18),
    '<schema name="s"><module name="a" x="1">x</module></schema>': (1, 18),
    '<schema name="s"><module name="a">x</module><union><module name="a">y</module></union></schema>': (1, 52),  # noqa: E501
    '<schema name="s"><union>text</union></schema>': (1, 25),
    '<schema name="s"><union scaffold="b"><module name="a">x</module></union></schema>': (1, 18),
    '<schema name="s"><union x="a"><module name="a">x</module></union></schema>': (1, 18),
    '<schema name="s"><param name="x" len="1"/></schema>': (1, 18),
    '<schema name="s"><module name="a"><param name="x"/></module></schema>': (1, 35),
    '<schema name="s"><module name="a"><param name="x" len="-1"/></module></schema>': (1, 35),
    '<schema name="s"><module name="a"><param name="x" len="0"/></module></schema>': (1, 35),
    '<schema name="s"><module name="a"><param name="x" len="9" length="9"/></module></schema>': (1, 35),  # noqa: E501
    '<schema name="s"><module name="a"><param name="x" len="1"/><param name="x" len="1"/></module></schema>': (1, 60),  # noqa: E501
    '<schema name="s"><user>x<user>y</user></user></schema>': (1, 25),
    '<schema name="s">x<scaffold modules="a b"/></schema>': (1, 19),
    '<schema name="s"><module name="a">x</module><scaffold modules="a"/></schema>': (1, 45),
    '<schema name="s"><union><module name="a">x</module><module name="b">x</module></union><scaffold modules="a b"/></schema>': (1, 87),  # noqa: E501
    '<schema name="s" xml:space="x">x</schema>': (1, 1),
    "<other>x</other>": (1, 1),
    "<pml>text</pml>": (1, 6),
    '<prompt>x</prompt>': (1, 1),
    '<prompt schema="s"><user>x</user><a/></prompt>': (1, 34),
    '<prompt schema="s"><user>x</user>y</prompt>': (1, 34),
    '<prompt schema="s"><user><a/></user></prompt>': (1, 26),
    '<prompt schema="s"><prompt schema="t"><user>x</user></prompt></prompt>': (1, 20),
    '<prompt schema="s"><message name="m">x</message></prompt>': (1, 20),
    '<schema name="s">\x00</schema>': (1, 18),
}  # fmt: skip


@pytest.mark.parametrize("markup", _BAD)
def test_an_error_says_where(markup: str) -> None:
    with pytest.raises(PmlError) as caught:
        parse(markup)
    line, column = re.match(r"line (\d+), column (\d+): ", str(caught.value)).groups()  # type: ignore[union-attr]
    assert (int(line), int(column)) == _BAD[markup], str(caught.value)


@given(markup=st.text(max_size=200))
def test_any_text_is_read_or_refused(markup: str) -> None:
    _read(markup)


@given(seed=st.integers(0, 10**9), schema=schemas(ANY_TEXT))
def test_damaged_markup_is_read_or_refused(seed: int, schema: Schema) -> None:
    rng = random.Random(seed)
    text = list(to_markup(schema))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        rng.choice((text.pop, lambda i: text.insert(i, rng.choice("<>&\"'/= \0é"))))(at)
    _read("".join(text))


def _read(markup: str) -> None:
    try:
        parse(markup)
    except PmlError as error:
        assert error.message


def test_size_and_depth_are_bounded_and_told_quickly() -> None:
    begun = time.process_time()
    deep = "<module name='a'>" * 100_000
    with pytest.raises(PmlError, match=f"nested {MAX_DEPTH} deep"):
        parse(f'<schema name="s">{deep}')
    with pytest.raises(PmlError, match=f"{MAX_NODES} elements"):
        parse(f'<schema name="s">{"<b/>" * 10 * MAX_NODES}</schema>')
    with pytest.raises(PmlError, match="characters"):
        parse(" " * (MAX_CHARS + 1))
    many = " ".join(f'a{n}="x"' for n in range(1000))
    with pytest.raises(PmlError, match="attributes"):
        parse(f'<prompt schema="s"><a {many}/></prompt>')
    tree: Any = Text("x")
    for _ in range(5_000):
        tree = Module((tree,), name="a")
    with pytest.raises(PmlError, match="deep"):
        check_schema(Schema((tree,), name="s"))
    assert time.process_time() - begun < 5


def test_trees_that_are_no_schemas() -> None:
    for children in (
        (),
        (Text("\x00"),),
        (Text("\ud800"),),
        (Text(3),),  # type: ignore[arg-type]
        (Union(()),),
        (Module((Text("x"),), name="a", cache="yes"),),  # type: ignore[arg-type]
        (Turn((Text("x"),), role="judge"),),
        (Use(name="a"),),
    ):
        with pytest.raises(PmlError):
            to_markup(Schema(children, name="s"))
