# SPDX-License-Identifier: Apache-2.0
"""Layouts of schemas and plans of prompts, without an engine: laws, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pml.reference import Meaning, runs_of
from tests.pml.trees import Words, prompts, schemas
from vllm_choreo.errors import ChoreoError, NameTakenError, PmlError, UnknownSchemaError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import LaidUnion, SchemaLayout, Tokens
from vllm_choreo.pml.language.outline import outline
from vllm_choreo.pml.language.placing import PromptPlan
from vllm_choreo.pml.language.registered import EncodingKey
from vllm_choreo.pml.language.schema_book import SchemaBook
from vllm_choreo.pml.language.tree import Schema


def book(*registered: Any, **options: Any) -> SchemaBook:
    words = Words()
    made = SchemaBook(Tokens(words), ChatTemplate(words))
    for schema in registered:
        made.register(schema, **options)
    return made


# -- layouts -------------------------------------------------------------------------------------


@given(schema=schemas())
def test_every_token_appears_once_and_where_it_should(schema: Schema) -> None:
    layout = book(schema).schemas[schema.name].layout
    found = [
        (s.path, s.position, list(s.token_ids)) for m in layout.root.walk() for s in m.segments
    ]
    expected = [(run.path, run.start, run.tokens) for run in runs_of(schema)]
    assert sorted(found) == sorted(expected)


@given(schema=schemas())
def test_positions_overlap_in_unions_alone(schema: Schema) -> None:
    layout = book(schema).schemas[schema.name].layout

    def check(laid: Any) -> None:
        end = laid.start
        for item in laid.items:
            start = getattr(item, "position", None)
            start = item.start if start is None else start
            assert start == end, "everything begins where the last item ended"
            end = item.stop
            members = item.members if isinstance(item, LaidUnion) else [item]
            for member in members:
                if hasattr(member, "items"):
                    assert member.start == start
                    check(member)
            if isinstance(item, LaidUnion):
                assert item.stop == max(member.stop for member in members)
        assert laid.stop == end

    check(layout.root)


# -- prompts -------------------------------------------------------------------------------------


def taken(plan: PromptPlan, layout: dict[str, SchemaLayout]) -> list[tuple[int | None, Any]]:
    """What a plan reads: where it is seen, and the tokens."""
    made = []
    for part in plan.parts:
        if isinstance(part.source, EncodingKey):
            segments = layout[part.source.schema].root.walk()
            found = next(
                s
                for m in segments
                for s in m.segments
                if (s.path, s.index) == (part.source.path, part.source.number)
            )
            made.append((part.offset, found.token_ids[part.start : part.stop]))
        elif isinstance(part.source, int):
            made.append((part.offset, plan.calls[part.source].token_ids))
    return made


@given(data=st.data(), layout=st.sampled_from(("schema", "compact")))
def test_a_plan_reads_what_the_prompt_means(data: st.DataObject, layout: str) -> None:
    schema = data.draw(schemas())
    prompt = data.draw(prompts(schema, text_among=layout == "compact"))
    made = book(schema)
    try:
        plan = made.asked(prompt, {"layout": layout}).plan
    except PmlError as error:
        assert "chat template" in str(error) or "does not fit" in str(error)
        return
    meaning = Meaning([schema], prompt, layout=layout)
    expected = [(at, tuple(u.tokens[a:b])) for u, a, b, at in meaning.header.sees]
    found = taken(plan, {schema.name: made.schemas[schema.name].layout})
    if layout == "compact":
        assert [ids for _, ids in found] == [ids for _, ids in expected]
        assert all(part.offset is None for part in plan.parts)
    else:
        assert found == expected
        assert plan.header.offset == meaning.header.position
    assert plan.header.token_ids == tuple(meaning.header.tokens)
    usage = plan.usage
    counts = (usage.module_tokens, usage.argument_tokens, usage.new_tokens, usage.message_tokens)
    assert counts == (meaning.num_modules, meaning.num_arguments, meaning.num_new, 0)


@given(data=st.data(), context=st.sampled_from(("modules", "schema")))
def test_what_is_missing_comes_in_an_order_that_can_be_encoded(
    data: st.DataObject, context: str
) -> None:
    schema = data.draw(schemas())
    made = book(schema, context=context)
    waiting = made.missing(made.named(schema.name).all_keys())
    assert len(set(waiting)) == len(waiting)
    for key in waiting:
        assert made.ready([key]) == [key]
        call = made.encoding(key)
        ends = [o + len(p) for o, p in zip(call["offsets"], call["parents"], strict=True)]
        assert ends == sorted(ends) and max(ends, default=0) <= call["new_offset"]
        made.handles[key] = call["tokens"]


SCHEMA = """<schema name="s">t1 <module name="a"> t2 <param name="x" len="2"/> t3 </module>
  <union><module name="b">t4 t5 t6</module><module name="c">t7</module></union>
  <module name="d" cache="false">t8 <module name="e">t9</module></module> t10</schema>"""


def asked(prompt: str, **options: Any) -> PromptPlan:
    return book(SCHEMA).asked(prompt, options).plan


def test_text_fills_gaps_and_no_more() -> None:
    # 0: t1, 1: t2 x x t3, 5: b or c, 8: d, 9: e, 10: t10
    plan = asked('<prompt schema="s"><c/>t20 t21<d/>t22</prompt>')
    assert [(c.token_ids, c.offset) for c in plan.calls] == [((20, 21, 8), 6), ((22,), 11)]
    assert [p.offset for p in plan.parts] == [0, 5, 6, 10]
    with pytest.raises(PmlError, match=r"line 1, column 24: new text of 3 tokens .* gap of 2"):
        asked('<prompt schema="s"><c/>t20 t21 <!-- --> t22<d/>t23</prompt>')
    plan = asked('<prompt schema="s">t20 t21<b/>t22</prompt>')  # before b, after t1
    assert [(c.token_ids, c.offset) for c in plan.calls] == [((20, 21), 1), ((22,), 11)]
    plan = asked('<prompt schema="s"><a x="t30"/>t22</prompt>')
    assert [(c.token_ids, c.offset) for c in plan.calls] == [((30,), 2), ((22,), 11)]
    assert [(p.offset, p.start, p.stop) for p in plan.parts] == [
        (0, None, None), (1, 0, 1), (2, None, None), (4, 3, 4), (10, None, None)
    ]  # fmt: skip


def test_an_empty_argument_is_an_argument() -> None:
    plan = asked('<prompt schema="s"><a x=""/>t22</prompt>')
    assert [(p.offset, p.start, p.stop) for p in plan.parts][1:3] == [(1, 0, 1), (4, 3, 4)]
    plan = asked('<prompt schema="s"><a/>t22</prompt>')
    assert (plan.parts[1].offset, plan.parts[1].start) == (1, None)


def test_compact_takes_the_prompts_order() -> None:
    plan = asked('<prompt schema="s"><d><e/></d><b/>t20<a x="t30"/>t22</prompt>', layout="compact")
    # The text of all prompts keeps its place: t1, then d b a, then t10.
    assert [c.token_ids for c in plan.calls] == [(8,), (20,), (30,), (22,)]
    assert [c.num_parts for c in plan.calls] == [1, 4, 6, 9]


def test_messages_of_the_run() -> None:
    class Known:
        num_tokens = 2

    prompt = '<prompt schema="s"><c/><message name="m"/><d/>t22<message name="n"/>t23</prompt>'
    plan = book(SCHEMA).asked(prompt, {"messages": {"m": Known(), "n": "some-id"}}).plan
    assert [p.offset for p in plan.parts] == [0, 5, 6, 8, 10, 11, 12]
    assert plan.header.offset is None and plan.usage.message_tokens == 2
    with pytest.raises(PmlError, match="length of a passed message is not known"):
        book(SCHEMA).asked(prompt, {"messages": {"m": "some-id", "n": "some-id"}})
    with pytest.raises(PmlError, match="line 1, column 24: no message is passed"):
        asked(prompt)
    part = book(SCHEMA).asked(prompt, {"messages": {"m": ("x", 3, 5), "n": "y"}}).plan
    assert part == plan


def test_a_prompt_of_several_schemas() -> None:
    other = '<schema name="t">t50 <module name="a">t51 t52</module></schema>'
    prompt = '<prompt schema="s"><c/><prompt schema="t"><a/> t60 </prompt> t61</prompt>'
    plan = book(SCHEMA, other).asked(prompt, {}).plan
    found = [(p.offset, p.source.schema) for p in plan.parts if isinstance(p.source, EncodingKey)]
    assert found == [(0, "s"), (5, "s"), (10, "s"), (11, "t"), (12, "t")]
    assert plan.calls[-1].token_ids == (60, 61) and plan.header.offset == 14


def test_turns_of_schema_and_prompt_are_one_conversation() -> None:
    schema = (
        '<schema name="s"><system>t1</system><user><module name="a">t2</module></user></schema>'
    )
    plan = book(schema).asked('<prompt schema="s"><a/></prompt>', {}).plan
    assert plan.header.token_ids == (492,)
    plan = (
        book(schema)
        .asked(
            '<prompt schema="s"><a/><assistant>t5</assistant><user>t6</user>'
            "<assistant>t7 </assistant></prompt>",
            {},
        )
        .plan
    )
    assert plan.header.token_ids == (492, 5, 499, 491, 6, 499, 492, 7)
    plan = book(schema).asked('<prompt schema="s"><a/>t9</prompt>', {}).plan
    assert plan.header.token_ids == (9,)


_REFUSED = [
    ('<prompt schema="x">t1</prompt>', UnknownSchemaError, "register it first"),
    ('<prompt schema="s"><z/>t1</prompt>', PmlError, "it has a, b, c, d"),
    ('<prompt schema="s"><e/>t1</prompt>', PmlError, "inside d"),
    ('<prompt schema="s"><a><b/></a>t1</prompt>', PmlError, "a has no such module"),
    ('<prompt schema="s"><a/><a/>t1</prompt>', PmlError, "taken once"),
    ('<prompt schema="s"><b/><c/>t1</prompt>', PmlError, "one union"),
    ('<prompt schema="s"><a y="t1"/>t1</prompt>', PmlError, "it has x"),
    ('<prompt schema="s"><b y="t1"/>t1</prompt>', PmlError, "it has none"),
    ('<prompt schema="s"><a x="t1 t2 t3"/>t1</prompt>', PmlError, "3 tokens, .* takes 2"),
    ('<prompt schema="s"><a/></prompt>', PmlError, "ends with new text"),
    ('<prompt schema="s"/>', PmlError, "ends with new text"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "error", "text"), _REFUSED)
def test_what_a_schema_refuses(prompt: str, error: type[ChoreoError], text: str) -> None:
    with pytest.raises(error, match=text):
        asked(prompt)


def test_what_options_are_refused() -> None:
    good = '<prompt schema="s">t1</prompt>'
    for options, text in (
        ({"layout": "x"}, "choose one of"),
        ({"parents": []}, "no such option"),
        ({"repair": [[(0, 1)]]}, "by a rule"),
    ):
        with pytest.raises(PmlError, match=text):
            asked(good, **options)
    with pytest.raises(PmlError, match="markup or a Prompt"):
        asked(3)  # type: ignore[arg-type]
    with pytest.raises(PmlError, match="choose one of"):
        book(SCHEMA, context="x")
    made = book(SCHEMA)
    assert made.register(SCHEMA) is made.schemas["s"]
    with pytest.raises(NameTakenError):
        made.register(SCHEMA, context="schema")
    with pytest.raises(PmlError, match="scaffold has 2 tokens"):
        book(
            '<schema name="s"><module name="a"><param name="x" len="1" scaffold="t1 t2"/>'
            "</module></schema>"
        )


def test_a_template_that_needs_all_turns_says_so() -> None:
    class Numbered(Words):
        def apply_chat_template(self, turns: Any, *args: Any, **kwargs: Any) -> str:
            return "".join(f" t{400 + i} {turn['content']} " for i, turn in enumerate(turns))

    words = Numbered()
    made = SchemaBook(Tokens(words), ChatTemplate(words))
    made.register(
        '<schema name="s"><module name="a"><user>t1</user></module><user>t2</user></schema>'
    )
    taken = made.asked('<prompt schema="s"><a/><user>t3</user></prompt>', {}).plan
    assert taken.header.token_ids == (402, 3)
    with pytest.raises(PmlError, match="writes the schema's turns otherwise"):
        made.asked('<prompt schema="s"><user>t3</user></prompt>', {})


def test_a_template_that_joins_system_and_user() -> None:
    class Joining(Words):
        """As that of Llama 2: the system's text is part of the first turn of the user."""

        def apply_chat_template(self, turns: Any, *args: Any, **kwargs: Any) -> str:
            roles = [turn["role"] for turn in turns]
            if "user" not in roles or roles.index("user") > 1:
                raise ValueError("a conversation begins with the user")
            around = {
                "system": " t400 {} t401 ",
                "user": " t402 {} t403 ",
                "assistant": " {} t404 ",
            }
            return "".join(around[turn["role"]].format(turn["content"]) for turn in turns)

    words = Joining()
    made = SchemaBook(Tokens(words), ChatTemplate(words))
    made.register(
        '<schema name="s"><system>t1</system><user><module name="a">t2</module></user></schema>'
    )
    ids = [s.token_ids for m in made.schemas["s"].layout.root.walk() for s in m.segments]
    assert ids == [(400, 1, 401, 402), (403,), (2,)]
    prompt = '<prompt schema="s"><a/><assistant>t5</assistant><user>t6</user></prompt>'
    assert made.asked(prompt, {}).plan.header.token_ids == (5, 404, 402, 6, 403)
    made.register('<schema name="t"><system>t1</system><module name="a">t2</module></schema>')
    asked = made.asked('<prompt schema="t"><a/><user>t3</user></prompt>', {}).plan
    assert asked.header.token_ids == (402, 3, 403), "the module lies between the two turns"


def test_a_template_that_refuses_everything() -> None:
    class Refusing(Words):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            raise ValueError("not today")

    words = Refusing()
    made = SchemaBook(Tokens(words), ChatTemplate(words))
    with pytest.raises(PmlError, match=r"refuses these turns \(not today\): .*take turns"):
        made.register('<schema name="u"><user>t1</user></schema>')


def test_the_outline_shows_tokens_positions_and_what_is_encoded() -> None:
    made = book(SCHEMA.replace("</schema>", '<scaffold modules="a b"/></schema>'))
    made.handles = dict.fromkeys(
        made.missing(made.asked('<prompt schema="s"><b/>t1</prompt>', {}).plan.keys)
    )
    assert (
        outline(made.schemas["s"].layout, made.handles)
        == """\
schema s         12 tokens   0…11
  text            1 tokens    0…1  encoded
  module a        4 tokens    1…5
    text [x: 2]   4 tokens    1…5
  union of 2      3 tokens    5…8
    module b      3 tokens    5…8
      text        3 tokens    5…8  encoded
    module c      1 tokens    5…6
      text        1 tokens    5…6
  module d        2 tokens   8…10
    text          1 tokens    8…9  with each prompt
    module e      1 tokens   9…10
      text        1 tokens   9…10
  text            1 tokens  10…11  encoded
  scaffold a b"""
    )
