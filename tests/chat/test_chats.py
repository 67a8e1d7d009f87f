# SPDX-License-Identifier: Apache-2.0
"""Chats cut into parts: no cut changes a token, and what comes again is cut the same."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES, tokenizer_of
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.forecast import Forecaster, requests_of
from vllm_choreo.chat.marks import Content, marked, places
from vllm_choreo.chat.matching import ChatPlan, Matching, plan_chat
from vllm_choreo.chat.message_table import Entry, MessageTable, digest
from vllm_choreo.chat.parts import Split
from vllm_choreo.cli import main as cli
from vllm_choreo.cli.explain import explained
from vllm_choreo.errors import ChoreoError

SYSTEM = "You answer questions about the documents, in one sentence, and never guess."
DOCUMENTS = [
    "The shed behind the house is green, and it was built in 1931 by Anna's grandfather.",
    "Bob owns a blue car, which he keeps in the garage of his neighbour for a small rent.",
    "The lighthouse has 199 steps; Carla counted them twice on the same rainy afternoon.",
]
QUESTION = "What colour is the shed behind the house, and who built it in which year?"
ANSWER = "The shed is green, and Anna's grandfather built it in the year 1931."
Chat = list[dict[str, Any]]


class Chats:
    """The chats of one family of models, cut as the server cuts them."""

    def __init__(self, name: str, min_tokens: int = 1, cut: str = "messages") -> None:
        self.tokenizer = tokenizer_of(name)
        self.family = FAMILIES[name]
        (end,) = self.tokenizer.encode(self.family.end, add_special_tokens=False)
        self.end: int = end
        ends = end_tokens(self.tokenizer, {"eos_token_id": [end]})
        self._cutter = Cutter(self.tokenizer, ends, min_tokens, cut)

    def render(self, chat: Chat, **options: Any) -> str:
        text = self.tokenizer.apply_chat_template(
            chat, tokenize=False, **{"add_generation_prompt": True, **options}
        )
        return str(text)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def split(self, chat: Chat, **options: Any) -> Split:
        text = self.render(chat, **options)
        marks, contents = marked(chat)
        return self._cutter.split(self.tokens(text), text, self.render(marks, **options), contents)

    def texts(self, split: Split) -> list[str]:
        return [self.tokenizer.decode(split.token_ids[p.start : p.stop]) for p in split.parts]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(num_rounds: int) -> Chat:
    asked = [[turn("user", f"{n}: {QUESTION}"), turn("assistant", ANSWER)] for n in range(9)]
    turns = [one for both in asked[:num_rounds] for one in both]
    return [turn("system", SYSTEM), *turns, turn("user", f"{num_rounds}: {QUESTION}")]


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_and_header_are_the_prompt(name: str) -> None:
    """Whatever the contents: tokens of the template, white space at the ends, marks."""
    chats, odd = Chats(name, min_tokens=24), random.Random(7)
    pieces = [*FAMILIES[name].tokens, " ", "\n\n", "CHOREOMARK1END", "grün", "</think>", "a b"]
    for _ in range(30):
        chat = conversation(odd.randrange(4))
        for one in chat:
            one["content"] = "x" + "".join(odd.choices(pieces, k=odd.randrange(1, 9)))
        split = chats.split(chat)
        assert split.token_ids == chats.tokens(chats.render(chat))
        borders = [0, *(part.stop for part in split.parts)]
        assert borders[:-1] == [part.start for part in split.parts]
        assert borders == sorted(set(borders)) and borders[-1] < len(split.token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_goes_on_is_cut_where_it_was(name: str) -> None:
    """The parts of a request come again in the next one, and its answer is the part behind them."""
    chats = Chats(name)
    for num_rounds in range(3):
        now, then = chats.split(conversation(num_rounds)), chats.split(conversation(num_rounds + 1))
        stable = [p for p in now.parts if not _moves(name, p.messages, num_rounds)]
        assert [now.token_ids[p.start : p.stop] for p in stable] == [
            then.token_ids[p.start : p.stop] for p in then.parts[: len(stable)]
        ]
        if stable == list(now.parts) and FAMILIES[name].keeps:
            # A template that writes a space before an answer has the model write it.
            space = " " if name == "mistral" else ""
            answer = (*now.token_ids[now.header_start :], *chats.tokens(space + ANSWER), chats.end)
            part = then.parts[len(stable)]
            assert then.token_ids[part.start : part.stop] == answer


def _moves(name: str, messages: tuple[int, ...], num_rounds: int) -> bool:
    """Whether the template writes a turn otherwise in the next request."""
    # The system text stands in the last user turn, whichever that is.
    return name == "mistral" and (0 in messages or 2 * num_rounds + 1 in messages)


def test_mistrals_answers_are_found_without_a_system_text() -> None:
    chats = Chats("mistral")
    now, then = chats.split(conversation(1)[1:]), chats.split(conversation(2)[1:])
    answer = (*now.token_ids[now.header_start :], *chats.tokens(" " + ANSWER), chats.end)
    assert chats.tokenizer.decode(now.token_ids[now.header_start :]) == "[/INST]"
    part = then.parts[len(now.parts)]
    assert then.token_ids[part.start : part.stop] == answer


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if not f.alternates])
def test_documents_in_another_order_are_the_same_parts(name: str) -> None:
    chats = Chats(name)
    turns = [turn("user", text) for text in DOCUMENTS]
    first = [turn("system", SYSTEM), *turns, turn("user", QUESTION)]
    other = [first[0], turns[2], turns[0], turns[1], first[-1]]
    one, two = chats.texts(chats.split(first)), chats.texts(chats.split(other))
    assert one != two and sorted(one) == sorted(two)


def test_a_thought_that_history_drops_moves_no_cut() -> None:
    chats = Chats("qwen3")
    chat = conversation(1)
    chat[2]["content"] = f"<think>\nHm.\n</think>\n\n{ANSWER}"
    texts = chats.texts(chats.split(chat))
    assert texts == chats.texts(chats.split(conversation(1)))
    assert f"\n<|im_start|>assistant\n{ANSWER}<|im_end|>" in texts


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tools_are_part_of_the_turn_in_which_they_stand(name: str) -> None:
    chats, tools = Chats(name), [{"type": "function", "function": {"name": "look_up"}}]
    with_tools = chats.texts(chats.split(conversation(1), tools=tools))
    without = chats.texts(chats.split(conversation(1)))
    pairs = enumerate(zip(with_tools, without, strict=True))
    differ = [number for number, pair in pairs if len(set(pair)) > 1]
    assert differ == [0 if name == "qwen3" else 1]


def test_a_tool_call_is_a_part_of_its_own() -> None:
    """It has no text; its turn ends where all turns do."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chat = [turn("user", QUESTION), call, turn("tool", "It is green."), turn("user", "So?")]
    texts = Chats("smollm2").texts(Chats("smollm2").split(chat, chat_template=template))
    assert [text.split()[0] for text in texts] == [
        f"<|im_start|>{role}" for role in ("user", "assistant", "tool", "user")
    ]


def test_a_date_that_turns_over_between_two_renderings_cuts_nothing() -> None:
    chats = Chats("llama3")
    marks, contents = marked(conversation(1))
    text = chats.render(conversation(1), date_string="31 Dec 2025")
    assert places(text, chats.render(marks, date_string="01 Jan 2026"), contents) == []


def test_contents_that_are_lists_of_texts_have_a_mark_each() -> None:
    items = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    chat, contents = marked([turn("user", items)])
    assert contents == [Content(0, "user", "a"), Content(0, "user", "b")]
    assert chat[0]["content"][1] == {"type": "image_url"}
    assert items[0]["text"] == "a"


def test_short_parts_are_joined_but_answers_are_not() -> None:
    chats = Chats("smollm2", min_tokens=60)
    chat = [turn("system", "Hi."), turn("user", "A?"), turn("assistant", "B."), turn("user", "C?")]
    (first, answer, last) = chats.split(chat).parts
    assert (first.messages, answer.messages, last.messages) == ((0, 1), (2,), (3,))
    long = [turn("system", "Hi."), *(turn("user", text) for text in DOCUMENTS)]
    assert [part.messages for part in chats.split(long).parts] == [(0,), (1,), (2,), (3,)]


def test_a_prompt_that_is_not_its_text_is_not_cut() -> None:
    """Truncated, or with special tokens added; or of a tokenizer that tells no characters."""
    chats = Chats("smollm2")
    marks, contents = marked(conversation(1))
    text = chats.render(conversation(1))
    cut = chats._cutter.split(chats.tokens(text)[1:], text, chats.render(marks), contents)
    assert (cut.parts, cut.reason) == ((), "tokenizer")
    whole = chats._cutter.split(
        chats.tokens(text), None, chats.tokens(chats.render(marks)), contents
    )
    assert whole == chats.split(conversation(1))  # a renderer may make tokens at once


# -- what is found ---------------------------------------------------------------------------------


SEEN = Matching()


class Tenant:
    """A book, and a plan of a chat with everything made that it asks for."""

    def __init__(self, max_messages: int = 100, max_tokens: int = 100_000) -> None:
        self.book = MessageTable(max_messages, max_tokens)
        self.gone: set[str] = set()
        self._count = 0

    def plan(self, split: Split, how: Matching = SEEN) -> ChatPlan:
        plan = plan_chat(split, self.book, how, self._is_live, self._new_id)
        assert plan.num_tokens == len(split.token_ids)
        self.book.make_room(len(plan.new), plan.num_new_tokens)
        for piece in plan.new:
            self.book.add(piece.entry)
        self.book.touch(plan.entries)
        return plan

    def answered(self, tokens: tuple[int, ...], context: bytes) -> None:
        self.book.add(Entry(digest(tokens), context, self._new_id(), len(tokens), is_answer=True))

    def _is_live(self, entry: Entry) -> bool:
        return entry.message_id not in self.gone

    def _new_id(self) -> str:
        self._count += 1
        return f"s/{self._count}"


def test_what_was_said_is_found_and_the_answer_with_it() -> None:
    chats, tenant = Chats("smollm2"), Tenant()
    first = tenant.plan(chats.split(conversation(0)))
    assert [piece.number for piece in first.new] == [0, 1]
    tenant.answered((*first.header, *chats.tokens(ANSWER), chats.end), first.context)
    second = tenant.plan(chats.split(conversation(1)))
    assert second.report()["found"] == 3 and [piece.number for piece in second.new] == [3]


def test_an_answer_that_was_cut_off_is_found_without_its_end() -> None:
    chats, tenant = Chats("smollm2"), Tenant()
    first = tenant.plan(chats.split(conversation(0)))
    tenant.answered((*first.header, *chats.tokens(ANSWER)), first.context)
    split = chats.split(conversation(1))
    second = tenant.plan(split)
    assert second.report()["found"] == 3
    (piece,) = second.new
    assert piece.token_ids[0] == chats.end
    lengths = [entry.num_tokens for entry in second.parents]
    assert sum(lengths) + len(second.header) == len(split.token_ids)


def test_of_equal_answers_the_one_is_read_that_was_given_there() -> None:
    chats, tenant = Chats("smollm2"), Tenant()
    made = []
    for number in range(2):
        plan = tenant.plan(chats.split(conversation(number)))
        tenant.answered((*plan.header, *chats.tokens(ANSWER), chats.end), plan.context)
        made.append(f"s/{tenant._count}")
    parents = tenant.plan(chats.split(conversation(2))).entries
    assert [parents[2].message_id, parents[4].message_id] == made
    # Behind another text there is none that fits: any will do.
    other = tenant.plan(chats.split(conversation(1)[1:])).entries
    assert other[2].message_id in made  # the template has a system text of its own


def test_the_same_text_twice_is_one_message_that_is_read_twice() -> None:
    chats, tenant = Chats("smollm2"), Tenant()
    chat = [turn("system", SYSTEM), *(turn("user", DOCUMENTS[0]) for _ in range(2))]
    plan = tenant.plan(chats.split([*chat, turn("user", QUESTION)]))
    assert plan.entries[1] is plan.entries[2] and len(plan.new) == 3


def test_adapters_and_tenants_have_messages_of_their_own() -> None:
    split = Chats("smollm2").split(conversation(1))
    tenant = Tenant()
    tenant.plan(split)
    assert tenant.plan(split).report()["found"] == len(split.parts)
    assert tenant.plan(split, Matching("lora")).report()["found"] == 0
    assert Tenant().plan(split).report()["found"] == 0


def test_a_message_that_is_gone_is_made_again() -> None:
    split = Chats("smollm2").split(conversation(1))
    tenant = Tenant()
    lost = tenant.plan(split).entries[1]
    tenant.gone.add(lost.message_id)
    plan = tenant.plan(split)
    assert [piece.number for piece in plan.new] == [1]
    assert tenant.book.find(lost.key) is plan.entries[1]


def test_a_flood_stays_within_the_limits_and_leaves_what_is_read() -> None:
    book = MessageTable(max_messages=10, max_tokens=500)
    read = [Entry(digest([0, n]), b"", f"read{n}", 40) for n in range(3)]
    for entry in read:
        book.add(entry)
    book.enter(read)
    for n in range(200):
        freed = book.make_room(1, 30 + n % 60)
        assert not any(entry.num_users for entry in freed)
        book.add(Entry(digest([1, n]), b"", f"flood{n}", 30 + n % 60))
        assert len(book) <= 10 and book.num_tokens <= 500
    assert all(book.find(entry.key) is entry for entry in read)
    book.leave(read)
    book.make_room(10, 0)
    assert len(book) == 0 and book.num_tokens == 0


def test_what_comes_first_in_a_chat_goes_last() -> None:
    """Copies of a message go with those before it."""
    book = MessageTable(max_messages=3, max_tokens=100)
    chat = [Entry(digest([n]), b"", str(n), 1) for n in range(3)]
    for entry in chat:
        book.add(entry)
    book.touch(chat)
    assert book.make_room(2, 0) == [chat[2], chat[1]]


# -- what recorded chats would reuse ---------------------------------------------------------------


def forecaster(name: str) -> Forecaster:
    chats = Chats(name)
    return Forecaster(chats.tokenizer, chats._cutter, block_size=16)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "gemma"])
def test_of_a_recorded_conversation_all_is_reused_but_the_next_question(name: str) -> None:
    follower = forecaster(name)
    turns = conversation(3)
    found = [follower.request(chat, answer) for chat, answer, _ in requests_of({"messages": turns})]
    assert len(found) == 4 and found[0].exact == found[0].choreo == found[0].prefix == 0
    for one in found[1:]:
        assert one.exact == one.choreo == sum(p.num_tokens for p in one.parts[:-1])
        assert one.exact - 16 <= one.prefix <= one.exact + 16  # text has it in whole blocks
        assert not one.may_differ and one.parts[-1].state == "new"


def test_a_forecast_knows_its_own_chats_alone() -> None:
    """Whatever others have followed in the same process, it tells the same."""
    chats = [chat for chat, _, _ in requests_of({"messages": conversation(3)})]
    told = []
    for _ in range(2):
        follower = forecaster("smollm2")
        told.append([follower.request(chat, None) for chat in chats])
    assert told[0] == told[1] and told[0][0].choreo == 0 < told[0][-1].choreo


def test_of_documents_in_another_order_choreo_reuses_what_text_does_not() -> None:
    follower = forecaster("smollm2")
    turns = [turn("user", text) for text in DOCUMENTS]
    chats = [
        {"messages": [turn("system", SYSTEM), *(turns[n] for n in order), turn("user", QUESTION)]}
        for order in ([0, 1, 2], [2, 0, 1], [2, 0, 1])
    ]
    first, other, again = (follower.request(chat, None) for chat, _, _ in requests_of(chats))
    assert [part.state for part in other.parts] == ["same", "moved", "moved", "moved", "moved"]
    assert first.choreo == 0 and other.may_differ
    assert other.choreo == sum(part.num_tokens for part in other.parts)
    assert other.exact == first.parts[0].num_tokens
    assert again.exact == again.choreo == other.choreo
    table = explained([first, other, again], with_parts=True)
    assert "2 of 3 answers may differ" in table and "message 3: reused in choreo" in table


@pytest.mark.parametrize("recorded", [[], {}, {"messages": "Hm"}, [{"messages": ["Hm"]}]])
def test_what_is_no_recording_is_refused(recorded: Any) -> None:
    if recorded == []:
        assert list(requests_of(recorded)) == []
        return
    with pytest.raises(ChoreoError, match="a recording is an object"):
        list(requests_of(recorded))


def test_the_command_of_the_page_explains_the_example(
    embedded_model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "on-ramps.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^vllm-choreo (explain .*)$", page, re.MULTILINE)
    monkeypatch.chdir(root)
    assert cli.main(command.split()) == 0
    out = capsys.readouterr().out
    assert "1 of 3 answers may differ" in out and "message 3: reused in choreo" in out


def test_the_command_explains_a_file(
    tmp_path: Path, embedded_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": conversation(2)}))
    assert cli.main(["explain", "--chat", str(file), "--parts"]) == 0
    out = capsys.readouterr().out
    assert "0 of 3 answers may differ" in out and "assistant  message 2: reused" in out
    file.write_text("{")
    assert cli.main(["explain", "--chat", str(file)]) == 1
