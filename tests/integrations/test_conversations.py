# SPDX-License-Identifier: Apache-2.0
"""Chats as messages of a session: whatever the template does, the model reads what it rendered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.errors import ChoreoError
from vllm_choreo.integrations.answers import ChatAnswer, read_answer
from vllm_choreo.integrations.conversations import ID_KEY, Conversations, HttpRequest, Refused

Chat = list[dict[str, Any]]
Template = Callable[[Chat, bool], str]


def chatml(chat: Chat, generate: bool) -> str:
    """With a system turn of its own where there is none, as SmolLM2's."""
    begin = "" if chat and chat[0]["role"] == "system" else "<system>be good<end>\n"
    turns = "".join(f"<{m['role']}>{m['content']}<end>\n" for m in chat)
    return begin + turns + ("<assistant>" if generate else "")


def bare(chat: Chat, generate: bool) -> str:
    """Without a generation prompt, as Mistral's."""
    return "".join(
        f"[{m['content']}]" if m["role"] != "assistant" else f"{m['content']}|" for m in chat
    )


def forgetful(chat: Chat, generate: bool) -> str:
    """What the assistant thought is dropped from history, as Qwen's does: no rendering of the first
    messages is the beginning of that of all.
    """
    last = max((i for i, m in enumerate(chat) if m["role"] == "user"), default=0)
    kept = [
        {**m, "content": m["content"].rpartition("~")[2]} if i < last else m
        for i, m in enumerate(chat)
    ]
    return chatml(kept, generate)


def refusing(chat: Chat, generate: bool) -> str:
    """Some templates refuse a chat that is not there in full."""
    if not generate and chat[-1]["role"] != "user":
        raise ValueError("ends with another")
    return chatml(chat, generate)


def counting(chat: Chat, generate: bool) -> str:
    """The number of messages stands in front: nothing can be cut."""
    return f"{len(chat)}:" + chatml(chat, generate)


TEMPLATES = [chatml, bare, forgetful, refusing, counting]


class ToyServer:
    """Answers what is asked, with one token a character; it answers a chat with `says`."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.messages: dict[str, list[int]] = {}
        self.contexts: dict[str, list[str]] = {}
        self.asked: list[str] = []

    def reply(self, ask: HttpRequest) -> Any:
        self.asked.append(ask.path)
        if ask.path == "/v1/choreo/sessions":
            return {"id": "S"}
        if ask.path == "/tokenize":
            generate = ask.body.get("add_generation_prompt", True)
            try:
                return {"tokens": _tokens(self.template(ask.body["messages"], generate))}
            except ValueError:
                return Refused({"type": "BadRequestError"}, None)
        assert ask.path == "/v1/choreo/sessions/S/messages"
        for call in ask.body["calls"]:
            if call["save_as"] in self.messages:
                taken = {"type": "NameTakenError", "value": f"S/{call['save_as']}"}
                return Refused(taken, None)
        data = []
        for call in ask.body["calls"]:
            assert all(parent in self.messages for parent in call["parents"])
            self.messages[call["save_as"]] = call["content"]
            self.contexts[call["save_as"]] = call["parents"]
            usage = {"encoded_tokens": len(call["content"])}
            data.append({"object": "choreo.message", "usage": usage})
        return {"data": data}

    def chat(self, conversations: Conversations, chat: Chat, says: str = "yes<end>") -> Any:
        """Run a chat: the body that was sent, and what the call read, as text."""
        sent = _driven(conversations.prepare({"model": "m", "messages": chat}), self)
        xargs = sent["vllm_xargs"]
        read = [token for name in xargs["choreo_parents"] for token in self.messages[name]]
        header = self.header(sent)
        self.messages[xargs["choreo_save_as"]] = [*header, *_tokens(says)]
        usage = {"encoded_tokens": len(header) + len(says)}
        text = says.removesuffix("<end>")
        answer = ChatAnswer(True, tuple(header), tuple(_tokens(says)), text, (), usage)
        conversations.answered(sent, answer)
        return sent, "".join(map(chr, [*read, *header]))

    def header(self, sent: dict[str, Any]) -> list[int]:
        """What of a chat the parents do not stand for."""
        whole = _tokens(self.template(sent["messages"], True))
        prefix = sent["vllm_xargs"]["choreo_prefix"]
        assert whole[: len(prefix)] == prefix
        assert len(prefix) < len(whole), "a call has a header"
        return whole[len(prefix) :]


def _tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _driven(steps: Any, server: ToyServer) -> Any:
    reply: Any = None
    try:
        while True:
            ask = steps.throw(reply) if isinstance(reply, Refused) else steps.send(reply)
            reply = server.reply(ask)
    except StopIteration as done:
        return done.value


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


TURNS = st.builds(
    turn, st.sampled_from(["system", "user", "assistant"]), st.sampled_from(["", "a", "b~c", "no"])
)


@pytest.mark.parametrize("mode", ["choreo", "exact"])
@pytest.mark.parametrize("template", TEMPLATES)
@given(chats=st.lists(st.lists(TURNS, min_size=1, max_size=6), min_size=1, max_size=3))
def test_what_is_read_is_what_the_template_renders(
    template: Template, mode: str, chats: Sequence[Chat]
) -> None:
    server, conversations = ToyServer(template), Conversations(mode)
    for chat in chats:
        said = "b~c" if template is forgetful else "no"
        _, read = server.chat(conversations, chat, f"{said}<end>")
        assert read == template(chat, True)
        more = [*chat, turn("assistant", said), turn("user", "a")]
        _, read = server.chat(conversations, more)
        assert read == template(more, True)


def test_documents_in_any_order_are_encoded_once() -> None:
    server, conversations = ToyServer(chatml), Conversations()
    rule, one, two = turn("system", "s"), turn("user", "one"), turn("user", "two")
    server.chat(conversations, [rule, one, two, turn("user", "q")])
    num_messages, asked = len(server.messages), len(server.asked)
    sent, _ = server.chat(conversations, [rule, two, one, turn("user", "q")])
    assert len(server.messages) == num_messages + 1  # the answer
    assert server.asked[asked:] == ["/tokenize"]
    assert len(sent["vllm_xargs"]["choreo_parents"]) == 4
    assert server.header(sent) == _tokens("<assistant>")


def test_an_answer_is_read_as_it_was_generated() -> None:
    server, conversations = ToyServer(chatml), Conversations()
    chat = [turn("system", "s"), turn("user", "q")]
    sent, _ = server.chat(conversations, chat, "yes<end>")
    name = sent["vllm_xargs"]["choreo_save_as"]
    again, _ = server.chat(conversations, [*chat, turn("assistant", "yes"), turn("user", "r")])
    assert name in again["vllm_xargs"]["choreo_parents"]


@pytest.mark.parametrize(
    ("mode", "content", "is_reused"),
    [("choreo", "yes", True), ("exact", "yes", False), ("choreo", "yes!", False)],
)
def test_an_answer_of_other_tokens_is_known_by_its_id(
    mode: str, content: str, is_reused: bool
) -> None:
    """In exact mode the text counts, and so it does once somebody has changed it."""
    server, conversations = ToyServer(chatml), Conversations(mode)
    chat = [turn("system", "s"), turn("user", "q")]
    sent = _driven(conversations.prepare({"model": "m", "messages": chat}), server)
    name = sent["vllm_xargs"]["choreo_save_as"]
    generated = (1000, 1001, ord("\n") + 5000, ord(">"))  # other tokens of the same text
    header = server.header(sent)
    server.messages[name] = [*header, *generated]
    conversations.answered(sent, ChatAnswer(True, tuple(header), generated, "yes", (), {}))
    answer = {**turn("assistant", content), ID_KEY: f"S/{name}"}
    again, _ = server.chat(conversations, [*chat, answer, turn("user", "r")])
    assert (name in again["vllm_xargs"]["choreo_parents"]) == is_reused
    assert all(ID_KEY not in message for message in again["messages"])


def test_a_chat_that_the_server_renders_otherwise_is_not_cut() -> None:
    body = {"model": "m", "messages": [turn("user", "q")]}
    sent = _driven(Conversations().prepare(body, is_cut=False), ToyServer(chatml))
    assert sent["vllm_xargs"]["choreo_parents"] == sent["vllm_xargs"]["choreo_prefix"] == []


def test_exact_messages_have_the_whole_history_as_parents() -> None:
    server, conversations = ToyServer(chatml), Conversations("exact")
    sent, _ = server.chat(conversations, [turn("system", "s"), turn("user", "q")])
    first, second = sent["vllm_xargs"]["choreo_parents"]
    assert server.contexts == {first: [], second: [first]}
    assert sent["vllm_xargs"]["choreo_mode"] == "exact"


def test_messages_that_another_client_has_made_are_taken() -> None:
    server = ToyServer(chatml)
    chat = [turn("system", "s"), turn("user", "q")]
    server.chat(Conversations(session="S"), chat)
    conversations = Conversations(session="S")
    _, read = server.chat(conversations, [*chat, turn("user", "r")])
    assert read == chatml([*chat, turn("user", "r")], True)
    assert conversations.encoded_tokens == len("<user>r<end>\n<assistant>yes<end>")


def test_what_the_server_has_lost_is_forgotten() -> None:
    conversations = Conversations()
    ToyServer(chatml).chat(conversations, [turn("system", "s")])
    assert not conversations.has_lost({"type": "LimitError"})
    assert conversations.has_lost({"type": "UnknownSessionError"})
    _, read = ToyServer(chatml).chat(conversations, [turn("system", "s")])
    assert read == chatml([turn("system", "s")], True)


def test_requests_that_name_parents_themselves_are_left_alone() -> None:
    assert not Conversations("off").is_ours({"messages": []})
    assert not Conversations().is_ours({"vllm_xargs": {"choreo_parents": ["a"]}})
    assert Conversations().is_ours({"vllm_xargs": {"other": 1}})
    with pytest.raises(ChoreoError, match="choreo, exact, off"):
        Conversations("fast")


def test_answers_are_read_whole_and_as_streams() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    whole = {
        "choices": [{"message": {"content": "Hi", "tool_calls": [call]}, "token_ids": [1, 2]}],
        "usage": {"total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
        "choreo": {"id": "S/a"},
        "prompt_token_ids": [7, 8],
    }
    parts = [
        {"choices": [{"delta": {"content": ""}}], "prompt_token_ids": [7, 8]},
        {"choices": [{"delta": {"content": "H"}, "token_ids": [1]}]},
        {"choices": [{"delta": {"content": "i"}, "token_ids": [2]}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, **call}]}}]},
        {"choices": [], "usage": whole["usage"], "choreo": {"id": "S/a"}},
    ]
    lines = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    answer = read_answer(json.dumps(whole).encode())
    assert answer == read_answer(lines.encode())
    assert answer.is_message and answer.encoded_tokens == 5
    assert (answer.header, answer.tokens) == ((7, 8), (1, 2))
    said = {"content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}
    assert answer.is_told_by(said) and not answer.is_told_by({**said, "content": "Ho"})
    assert not read_answer(lines[:150].encode()).is_message


def test_nothing_is_cut_from_the_first_picture_on() -> None:
    """Its tokens are those of any picture: the server gets it with the messages, each time."""
    shown = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]
    texts = [{"type": "text", "text": "a"}]
    for content, num_parents in ((shown, 1), (texts, 3)):
        server, conversations = ToyServer(chatml), Conversations("choreo")
        chat = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": content},
            {"role": "user", "content": "c"},
        ]
        sent, read = server.chat(conversations, chat)
        assert len(sent["vllm_xargs"]["choreo_parents"]) == num_parents
        assert read == chatml(chat, True) and sent["messages"] == chat
