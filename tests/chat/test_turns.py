# SPDX-License-Identifier: Apache-2.0
"""Turns that stand by themselves, as six families of templates write them."""

from __future__ import annotations

import pytest

from tests.chat.chat_templates import FAMILIES, tokenizer_of
from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.errors import ChoreoError

ALTERNATES = [name for name, family in FAMILIES.items() if family.alternates]


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_in_a_row_are_what_the_template_writes(name: str) -> None:
    """The oracle is the template itself, on conversations that begin with a user's turn or not."""
    tokenizer = tokenizer_of(name)
    turns = turns_of_tokenizer(tokenizer)

    def rendered(*chat: tuple[str, str]) -> str:
        messages = [{"role": role, "content": text} for role, text in chat]
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    asked = rendered(("user", "Why?"))
    assert asked.startswith(turns.start)
    assert asked.endswith(turns.user("Why?") + turns.assistant())
    if name in ALTERNATES:  # the system's text has no turn of its own
        assert asked == turns.start + turns.user("Why?") + turns.assistant()
        assert turns.system("Be brief.") == turns.user("Be brief.")
    else:
        told = rendered(("system", "Be brief."), ("user", "Why?"))
        whole = turns.system("Be brief.") + turns.user("Why?") + turns.assistant()
        assert told == turns.start + whole
    again = rendered(("user", "Who?"), ("assistant", "Anna."), ("user", "Why?"))
    assert again.endswith(turns.user("Why?") + turns.assistant())
    assert turns.user("Who?") + turns.opened_answer in again


@pytest.mark.parametrize(
    ("name", "start"), [("llama3", "<|begin_of_text|>"), ("mistral", "<s>"), ("gemma", "<bos>")]
)
def test_a_conversation_begins_with_the_token_that_begins_texts(name: str, start: str) -> None:
    turns = turns_of_tokenizer(tokenizer_of(name))
    assert turns.start == start
    assert start not in turns.system("a") + turns.user("b") + turns.assistant("c")


def test_chatml_is_the_default_and_that_of_models_that_write_it() -> None:
    for name in ("smollm2", "qwen3"):
        assert turns_of_tokenizer(tokenizer_of(name)) == ChatTurns()
    assert ChatTurns().user("Hi") == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_header_of_a_call_is_never_empty() -> None:
    turns = turns_of_tokenizer(tokenizer_of("mistral"))
    assert turns.assistant() == "" and turns.assistant("Yes") == " Yes"
    assert turns.answer_alone() == " Answer:"
    assert ChatTurns().answer_alone() == ChatTurns().assistant()


def test_turns_go_through_json() -> None:
    turns = turns_of_tokenizer(tokenizer_of("llama3"))
    assert ChatTurns.from_json(turns.to_json()) == turns
    with pytest.raises(ChoreoError, match=r"user_opening.*\(turns="):
        ChatTurns.from_json({"opening": "x"})
    with pytest.raises(ChoreoError, match="user_opening"):
        ChatTurns.from_json({"start": 1})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no') }}", "writes no chats"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "users' turns alike"),
        ("<u>{{ messages[0].content }}", "leaves a turn out"),
    ],
)
def test_a_template_that_writes_no_turns_is_refused(template: str, said: str) -> None:
    with pytest.raises(ChoreoError, match=said):
        turns_of_tokenizer(tokenizer_of("qwen3"), template)
