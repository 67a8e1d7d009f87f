# SPDX-License-Identifier: Apache-2.0
"""Pictures in chats: cuts around them, and messages that are found by what they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_choreo.chat.cutter import offsets_of
from vllm_choreo.chat.marks import marked, with_blank_pictures
from vllm_choreo.chat.matching import ChatPlan, Matching, plan_chat
from vllm_choreo.chat.message_table import Entry, MessageTable
from vllm_choreo.chat.parts import ChatPart, ChatPicture, Split, cut_long_parts

_IMAGE = 500


def _split(*names: int, question: int = 7) -> Split:
    """A turn with pictures of forty tokens, an answer, and a question of two, then a header."""
    tokens, pictures = [5], []
    for name in names:
        pictures.append(ChatPicture(len(tokens), len(tokens) + 40, name))
        tokens += [_IMAGE] * 40
    tokens += [6] * 100
    stops = (0, len(tokens), len(tokens) + 2, len(tokens) + 4)
    roles = ("user", "assistant", "user")
    parts = tuple(ChatPart(a, b, r) for a, b, r in zip(stops, stops[1:], roles, strict=False))
    return Split((*tokens, 3, 8, question, question, 9), parts, pictures=tuple(pictures))


class _Tenant:
    def __init__(self, **limits: int) -> None:
        self.book = MessageTable(**{"max_messages": 99, "max_tokens": 10**6, **limits})
        self.count = 0

    def ask(self, split: Split, how: Matching) -> ChatPlan:
        plan = plan_chat(split, self.book, how, lambda entry: True, self._new_id)
        for piece in plan.new:
            self.book.add(piece.entry)
            assert piece.token_ids == split.token_ids[piece.start : piece.stop]
        return plan

    def _new_id(self) -> str:
        self.count += 1
        return f"s/{self.count}"


@pytest.mark.parametrize(
    "how",
    [Matching(), Matching(reads_edits=True), Matching(context="alone", reads_edits=True)],
    ids=lambda how: f"{how.context}{how.reads_edits}",
)
def test_a_part_is_found_by_what_its_pictures_show(how: Matching) -> None:
    """Its tokens are those of any picture of its size."""
    tenant = _Tenant()
    assert len(tenant.ask(_split(-2, -3), how).new) == 3
    assert not tenant.ask(_split(-2, -3), how).new
    for other in (_split(-3, -2), _split(-2, -4), _split(-2, -2)):
        plan = tenant.ask(other, how)
        assert [piece.number for piece in plan.new if piece.start == 0] == [0]
        assert not plan.edited, "nothing may cut a picture"


def test_an_answer_behind_a_picture_in_the_header_is_found_by_it() -> None:
    """Where the last turn has no end of its own."""
    open_end = replace(_split(-2), parts=())
    for name, found in ((-2, True), (-3, False)):
        tenant = _Tenant()
        plan = tenant.ask(open_end, Matching())
        answer = (*open_end.token_ids, 21, 22)
        tenant.book.add(plan.answer_entry("s/answer", answer))
        same = ChatPicture(1, 41, name)
        whole = Split((*answer, 3), (ChatPart(0, len(answer), "assistant"),), pictures=(same,))
        assert (not tenant.ask(whole, Matching()).new) == found


def test_room_is_made_for_the_bytes_of_pictures() -> None:
    tenant = _Tenant(max_bytes=100)
    for number in range(3):
        entry = Entry(bytes([number]), b"", f"s/{number}", 10, num_bytes=40)
        victims = tenant.book.make_room(1, 10, entry.num_bytes)
        tenant.book.add(entry)
        assert [victim.message_id for victim in victims] == (["s/0"] if number == 2 else [])
    assert tenant.book.num_bytes == 80


def test_no_cut_by_content_is_inside_of_a_picture() -> None:
    split = _split(-2, -3)
    ranks = np.zeros(512, np.uint8)
    ranks[_IMAGE] = 3  # as if a paragraph ended behind each of its tokens
    cut = cut_long_parts(split, ranks, 16)
    plain = cut_long_parts(replace(split, pictures=()), ranks, 16)
    assert any(split.cuts_picture(part.start) for part in plain.parts), "or this shows nothing"
    assert len(cut.parts) > len(split.parts)
    assert not any(split.cuts_picture(part.start) for part in cut.parts)
    assert cut.pictures == split.pictures


def test_tokens_of_a_picture_have_the_characters_of_its_placeholder() -> None:
    """`a <image> b <image>`: of two and three tokens."""
    ids, offsets = [5, _IMAGE, 6, _IMAGE], [(0, 1), (1, 9), (9, 11), (11, 19)]
    pictures = [ChatPicture(1, 3, -2), ChatPicture(4, 7, -3)]
    tokens = [5, _IMAGE, _IMAGE, 6, _IMAGE, _IMAGE, _IMAGE]
    found = offsets_of(tokens, ids, offsets, pictures)
    assert found == [(0, 1), (1, 9), (1, 9), (9, 11), (11, 19), (11, 19), (11, 19)]
    assert offsets_of(ids, ids, offsets, []) == offsets
    for wrong in ([5, _IMAGE, 7, _IMAGE], ids[:3], [*ids, 8], [_IMAGE, *ids]):
        assert offsets_of(tokens, wrong, [(0, 0)] * len(wrong), pictures) is None


def test_blank_pictures_stand_for_those_of_a_chat() -> None:
    text = {"type": "text", "text": "a"}
    shown: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://a.b"}, "uuid": "c"}
    chat = [{"role": "user", "content": [text, shown]}, {"role": "user", "content": "b"}]
    marks, contents = marked(chat)
    blank = with_blank_pictures(marks)
    assert [c.text for c in contents] == ["a", "b"]
    assert blank[0]["content"][0] == marks[0]["content"][0] and blank[1] == marks[1]
    assert blank[0]["content"][1]["image_url"]["url"].startswith("data:image/gif")
    assert "uuid" not in blank[0]["content"][1]
