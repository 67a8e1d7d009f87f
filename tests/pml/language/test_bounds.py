# SPDX-License-Identifier: Apache-2.0
"""Markup that is short, and would be much work: refused before it is done, or linear."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pml.language.test_plans import book
from tests.pml.trees import schemas
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.markup import parse_prompt, parse_schema
from vllm_choreo.pml.language.registered import ALONE, EncodingKey, RegisteredSchema
from vllm_choreo.pml.language.whitespace import normalised

# Far more than is needed, and far less than the square of the length would take.
_SECONDS = 20.0


def _pieces(count: int, more: str = "") -> str:
    """A schema whose text is cut into pieces, each of which reads those before it."""
    modules = "".join(f't1 <module name="m{i}">t2</module>' for i in range(count))
    return f'<schema name="s">{modules}{more}</schema>'


def test_indentation_takes_the_time_of_its_length() -> None:
    n = 3_000_000
    start = time.process_time()
    text = normalised("a\n" + " " * n + "b\n  c", is_first=True, is_last=True)
    assert text == "a\n" + " " * (n - 2) + "b\nc"
    assert time.process_time() - start < _SECONDS


def test_scaffolds_that_read_too_much_are_refused_by_counting() -> None:
    scaffolds = "".join(f'<scaffold modules="m{2 * i} m{2 * i + 1}"/>' for i in range(400))
    start = time.process_time()
    with pytest.raises(PmlError, match=r"up to 10000 encodings.*\d{6} encodings"):
        book(_pieces(999, scaffolds))
    few = "".join(f'<scaffold modules="m{2 * i} m{2 * i + 1}"/>' for i in range(3))
    with pytest.raises(PmlError, match="up to 1000000 pieces that its pieces read"):
        book(_pieces(999, few))
    made = book(_pieces(999))
    assert len(made.missing(made.named("s").all_keys())) == 2 * 999
    assert time.process_time() - start < _SECONDS


def test_a_prompt_goes_through_so_many_pieces_at_most() -> None:
    made = book(_pieces(999))
    nested = '<prompt schema="s"/>'
    start = time.process_time()
    with pytest.raises(PmlError, match=r"20000 pieces .*: name fewer"):
        made.asked(f'<prompt schema="s">{nested * 9000}t3</prompt>', {"layout": "compact"})
    assert time.process_time() - start < _SECONDS
    plan = made.asked(f'<prompt schema="s">{nested * 3}t3</prompt>', {"layout": "compact"}).plan
    assert len(plan.parts) == 4 * 999


@pytest.mark.parametrize("read", [parse_schema, parse_prompt])
def test_a_conversation_has_so_many_turns(read: Any) -> None:
    what = "schema name" if read is parse_schema else "prompt schema"
    text = f'<{what}="s">{"<user>a</user>" * 1001}</{what.split()[0]}>'
    with pytest.raises(PmlError, match="there are 1000 turns at most"):
        read(text)
    read(text.replace("<user>a</user>", "", 1))


class _Template:
    """Renders turns by a function, and counts how many it was given."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_turns = 0

    def apply_chat_template(
        self, turns: Sequence[dict[str, str]], add_generation_prompt: bool, **options: Any
    ) -> str:
        self.num_turns += len(turns)
        return "".join(self._written(turns))

    def _written(self, turns: Sequence[dict[str, str]]) -> Iterator[str]:
        for number, turn in enumerate(turns):
            is_last = number == len(turns) - 1
            name = f"{number}:" if self.kind == "numbered" else ""
            if self.kind == "no system last" and is_last and turn["role"] == "system":
                raise ValueError("a conversation begins with the user")
            yield f"<{name}{turn['role']}>{turn['content']}"
            yield "</end>" if self.kind != "joined" or turn["role"] == "assistant" else ""
            yield "" if is_last else "\n"


@pytest.mark.parametrize("kind", ["plain", "joined", "no system last"])
@given(roles=st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=12))
def test_turns_are_divided_as_if_every_conversation_had_been_ended(
    kind: str, roles: list[str]
) -> None:
    if kind == "no system last" and roles[-1] == "system":
        roles = [*roles, "user"]
    divided = ChatTemplate(_Template(kind)).around(roles)
    pieces = ChatTemplate(_Template(kind))._pieces(tuple(roles), False)
    assert [a + b for (_, a), (b, _) in pairwise(divided)] == pieces[1:-1]
    for number in range(1, len(roles)):
        try:
            whole = ChatTemplate(_Template(kind))._pieces(tuple(roles[:number]), False)
        except PmlError:
            continue  # the turn has all that is between it and the next one
        assert divided[number - 1][1] == whole[-1]


def test_a_template_is_run_for_each_kind_of_border_once() -> None:
    template = _Template("plain")
    ChatTemplate(template).around(["user", "assistant"] * 500)
    assert template.num_turns < 1100, "and not for each of 1000 beginnings: 500,000"
    with pytest.raises(PmlError, match="something else between all turns"):
        ChatTemplate(_Template("numbered")).around(["user", "assistant"] * 500)


@given(data=st.data(), context=st.sampled_from(("modules", "schema")))
def test_what_an_encoding_reads_is_what_ends_before_it(data: st.DataObject, context: str) -> None:
    schema = data.draw(schemas())
    made = book(schema, context=context).named(schema.name)
    for key in made.all_keys():
        assert made.needs(key) == list(_read_by_definition(made, key))


def _read_by_definition(made: RegisteredSchema, key: EncodingKey) -> Iterator[EncodingKey]:
    paths = {key.path}
    if key.scaffold != ALONE:
        paths = made.involved(key.scaffold)
    elif made.context == "schema":
        paths = {key.path[:n] for n in range(len(key.path) + 1)}
    segments = [
        segment
        for module in made.layout.root.walk()
        if getattr(module.node, "cache", True) and module.path in paths
        for segment in module.segments
        if segment.stop <= made.segment(key).position
    ]
    for segment in sorted(segments, key=lambda segment: segment.position):
        yield key._replace(path=segment.path, number=segment.index)
