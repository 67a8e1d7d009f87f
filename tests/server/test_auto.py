# SPDX-License-Identifier: Apache-2.0
"""`choreo_auto`: chats that name no messages, against the same server without it, which is vLLM."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.chats import Chat, ask_chat, said, tokens_of, turn
from vllm_choreo.testing.server import KEYS, Server

SYSTEM = "You answer questions about the documents, in one sentence, and you never guess at all."
DOCUMENTS = [
    "The shed behind the house is green, and it was built in 1931 by Anna's grandfather, a smith.",
    "Bob owns a blue car, which he keeps in the garage of his neighbour for a small rent a month.",
    "The lighthouse has 199 steps; Carla counted them twice on the same rainy Sunday afternoon.",
]
QUESTION = (
    "What colour is the shed behind the house, and in which year did somebody build it there?"
)
DOCS = Path(__file__).parents[2] / "docs" / "on-ramps.md"
Ask = Callable[..., dict[str, Any]]


def reading(order: list[int], tag: str) -> Chat:
    """A chat over the documents; `tag` keeps the messages of a test apart from those of others."""
    texts = [turn("user", f"{tag}: {DOCUMENTS[number]}") for number in order]
    return [turn("system", f"{SYSTEM} {tag}"), *texts, turn("user", QUESTION)]


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server, ask: Ask) -> Iterator[None]:
    """Close the sessions that chats have opened: other tests look whether any is."""
    yield
    for key in KEYS:
        told = ask([turn("user", QUESTION)], "exact", key=key, max_tokens=1)["choreo"]
        with server.client(key) as client:
            assert client.delete(f"/v1/choreo/sessions/{told['session']}").status_code == 200


@pytest.fixture
def ask(server: Server) -> Ask:
    """One chat: the JSON of its answer, streams put together."""
    return partial(ask_chat, server)


# -- exact -----------------------------------------------------------------------------------------


def test_a_conversation_has_the_tokens_of_plain_text(ask: Ask) -> None:
    """And nothing of it is encoded twice, however its answers ended, streams and whole ones."""
    chat, known, num_found = reading([0], "talk"), [], 0
    for number, max_tokens in enumerate((4, 32, 4)):
        options = {"max_tokens": max_tokens, "stream": number == 1}
        plain, exact = ask(chat, **options), ask(chat, "exact", **options)
        assert tokens_of(exact) == tokens_of(plain)
        usage, told = exact["usage"], exact["choreo"]["auto"]
        assert usage["exact"] and told["mode"] == "exact"
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == plain["usage"][name]
        assert usage["reused_tokens"] + usage["encoded_tokens"] == usage["total_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["reused_tokens"]
        prompt, generated = tokens_of(exact)
        # An answer that was cut off inside a word is tokenised otherwise in the next prompt.
        if known and prompt[: len(known)] == known:
            assert usage["reused_tokens"] == len(known)
            num_found += 1
        known = [*prompt, *generated]
        chat = [*chat, said(plain), turn("user", f"{number}: {QUESTION}")]
    assert num_found


def test_documents_in_any_order_have_the_tokens_of_plain_text(ask: Ask) -> None:
    orders = ([0, 1, 2], [0, 2, 1], [0, 1, 2])
    answers = []
    for order in orders:
        chat = reading(order, "orders")
        answers.append(ask(chat, "exact"))
        assert tokens_of(answers[-1]) == tokens_of(ask(chat))
        assert answers[-1]["usage"]["exact"]
    told = [answer["choreo"]["auto"] for answer in answers]
    assert [(one["parts"], one["found"]) for one in told] == [(5, 0), (5, 5), (5, 5)]
    reused = [answer["usage"]["reused_tokens"] for answer in answers]
    assert reused[0] == 0
    assert 0 < reused[1] < reused[2]  # the beginning that they share, then all


def test_tools_lists_of_texts_and_continued_answers_are_as_in_plain_text(ask: Ask) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    items = [{"type": "text", "text": text} for text in DOCUMENTS[:2]]
    chats: list[tuple[Chat, dict[str, Any]]] = [
        ([turn("user", items), turn("user", QUESTION)], {}),
        (
            [
                turn("user", QUESTION),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": DOCUMENTS[0]},
            ],
            {"tools": tools, "tool_choice": "none"},
        ),
        (
            [turn("user", QUESTION), turn("assistant", "The shed is")],
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ]
    for chat, options in chats:
        assert tokens_of(ask(chat, "exact", **options)) == tokens_of(ask(chat, **options))


def test_many_at_once_have_the_tokens_of_plain_text(server: Server, ask: Ask) -> None:
    """Requests that make and read the same messages, some of which their clients abandon."""
    chats = [reading(order, "crowd") for order in ([0, 1, 2], [1, 0, 2], [0, 1, 2])]
    plain = [tokens_of(ask(chat)) for chat in chats]

    async def one(client: httpx.AsyncClient, chat: Chat, timeout: float) -> Any:
        body = {
            "model": server.model,
            "messages": chat,
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "vllm_xargs": {"choreo_auto": "exact"},
        }
        try:
            answer = await client.post("/v1/chat/completions", json=body, timeout=timeout)
        except httpx.TimeoutException:
            return None
        assert answer.status_code == 200, answer.text
        return tokens_of(answer.json())

    async def crowd() -> list[Any]:
        headers = {"Authorization": f"Bearer {KEYS[1]}"}
        async with httpx.AsyncClient(base_url=server.base_url, headers=headers) as client:
            abandoned = [one(client, chat, 0.05) for chat in chats[:2]]
            whole = [one(client, chat, 120.0) for chat in chats]
            return (await asyncio.gather(*abandoned, *whole))[len(abandoned) :]

    assert asyncio.run(crowd()) == plain


# -- choreo ----------------------------------------------------------------------------------------


def test_in_choreo_documents_are_read_wherever_they_stand(ask: Ask) -> None:
    first = ask(reading([0, 1, 2], "free"), "choreo")
    assert first["usage"]["exact"] and first["usage"]["reused_tokens"] == 0
    again = ask(reading([2, 0, 1], "free"), "choreo")
    told, usage = again["choreo"]["auto"], again["usage"]
    assert told["found"] == told["parts"] == 5 and not usage["exact"]
    assert usage["reused_tokens"] == told["found_tokens"]
    assert 0 < usage["repositioned_tokens"] < usage["reused_tokens"]
    repaired = ask(reading([1, 0, 2], "free"), "choreo", xargs={"choreo_repair": "first:4"})
    assert repaired["usage"]["repaired_tokens"] > 0


def test_a_document_is_found_wherever_it_was_pasted_into_a_turn(ask: Ask) -> None:
    """A line before it that changes costs its own piece."""
    pasted = " ".join(
        f"Row {n} of the list has {7 * n % 97} entries and a note." for n in range(60)
    )
    chats = [[turn("user", f"{day}: {pasted}")] for day in ("Monday", "It is Tuesday, the 4th")]
    cut = {"choreo_auto_cut": "content"}
    whole = ask(chats[0], "choreo", xargs=cut)["choreo"]["auto"]
    again = ask(chats[1], "choreo", xargs=cut)["choreo"]["auto"]
    assert whole["parts"] > 4 and whole["found"] == 0
    assert again["found"] >= whole["parts"] - 2
    assert tokens_of(ask(chats[1], "exact", xargs=cut)) == tokens_of(ask(chats[1]))
    # Cut at its messages alone, it is another text.
    assert ask(chats[0], "choreo")["choreo"]["auto"]["parts"] == 2  # SmolLM2's own system turn


def test_an_edited_line_is_encoded_alone(ask: Ask) -> None:
    cut = {"choreo_auto_cut": "content"}
    chats = [[turn("system", f"{SYSTEM} {n}. {DOCUMENTS[0]}"), turn("user", QUESTION)]
             for n in ("Monday", "Tuesday")]  # fmt: skip
    ask(chats[0], "choreo", xargs=cut)
    told = ask(chats[1], "choreo", xargs=cut)["choreo"]["auto"]
    assert (told["edited"], told["new_tokens"]) == (1, pytest.approx(10, abs=4))
    assert tokens_of(ask(chats[1], "exact", xargs=cut)) == tokens_of(ask(chats[1]))


def test_alone_is_asked_for_by_a_key(ask: Ask) -> None:
    alone = {"choreo_auto_context": "alone"}
    seen = ask(reading([0, 1], "whose"), "choreo")
    assert seen["choreo"]["auto"]["context"] == "seen"
    told = ask(reading([0, 1], "whose"), "choreo", xargs=alone)["choreo"]["auto"]
    assert told["context"] == "alone" and told["found"] == 0
    again = ask(reading([1, 0], "whose"), "choreo", xargs=alone)
    assert again["choreo"]["auto"]["found"] == again["choreo"]["auto"]["parts"]


# -- who shares, and how it is asked for -----------------------------------------------------------


def test_tenants_share_nothing(ask: Ask) -> None:
    chat = reading([0, 1], "mine")
    ask(chat, "exact")
    assert ask(chat, "exact")["choreo"]["auto"]["found"] == 4
    other = ask(chat, "exact", key=KEYS[1])
    assert other["choreo"]["auto"]["found"] == 0 and other["usage"]["reused_tokens"] == 0


def test_a_header_asks_for_it_and_named_parents_come_before(server: Server, ask: Ask) -> None:
    chat = reading([1], "header")
    assert "choreo" not in ask(chat) and "choreo" not in ask(chat, "off")
    by_header = ask(chat, headers={"X-Choreo-Auto": "exact"})
    assert by_header["choreo"]["auto"]["parts"] == 3
    named = ask(chat, headers={"X-Choreo-Auto": "exact"}, xargs={"choreo_save_as": "named"})
    assert "auto" not in named["choreo"]
    with server.client() as client:
        client.delete(f"/v1/choreo/sessions/{named['choreo']['session']}")
    joined_parts = ask(chat, "exact", xargs={"choreo_auto_min_tokens": 1_000})
    assert joined_parts["choreo"]["auto"]["parts"] == 1


def test_a_chat_that_cannot_be_cut_is_served_as_text_and_says_so(ask: Ask) -> None:
    # An answer for which there is no room behind messages that take whole blocks.
    chat, options = reading([0, 1], "long"), {"max_tokens": 1_900, "stop": [" "]}
    for stream in (False, True):
        answer = ask(chat, "exact", stream=stream, **options)
        assert answer["choreo"] == {"auto": {"mode": "exact", "text": "context"}}
        assert tokens_of(answer) == tokens_of(ask(chat, **options))


@pytest.mark.parametrize(
    ("xargs", "options", "parameter"),
    [
        ({"choreo_auto": "always"}, {}, "vllm_xargs.choreo_auto"),
        ({"choreo_auto": "exact", "choreo_parents": ["p"]}, {}, "vllm_xargs.choreo_parents"),
        ({"choreo_auto": "exact", "choreo_repair": "first:4"}, {}, "vllm_xargs.choreo_repair"),
        (
            {"choreo_auto": "exact", "choreo_auto_min_tokens": 0},
            {},
            "vllm_xargs.choreo_auto_min_tokens",
        ),
        (
            {"choreo_auto": "exact", "choreo_auto_cut": "sentences"},
            {},
            "vllm_xargs.choreo_auto_cut",
        ),
        (
            {"choreo_auto": "choreo", "choreo_auto_context": "alien"},
            {},
            "vllm_xargs.choreo_auto_context",
        ),
        (
            {"choreo_auto": "exact", "choreo_auto_context": "alone"},
            {},
            "vllm_xargs.choreo_auto_context",
        ),
        ({"choreo_auto": "exact"}, {"n": 2}, "n"),
        ({"choreo_auto": "exact"}, {"cache_salt": "s"}, "cache_salt"),
    ],
)
def test_refusals(
    xargs: dict[str, Any],
    options: dict[str, Any],
    parameter: str,
    server: Server,
    alpha: httpx.Client,
) -> None:
    body = {"model": server.model, "messages": [turn("user", "Hm")], "vllm_xargs": xargs, **options}
    answer = alpha.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == parameter


def test_a_completion_of_parts_has_the_tokens_of_all_of_them(
    server: Server, alpha: httpx.Client
) -> None:
    parts = [f"{text}\n" for text in DOCUMENTS] + [f"{QUESTION} Answer:"]

    def complete(prompt: Any, **more: Any) -> dict[str, Any]:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"return_token_ids": True, "add_special_tokens": False, **more}
        answer = alpha.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    for order in ([0, 1, 2], [2, 0, 1]):
        prompt = [parts[number] for number in order] + parts[3:]
        exact = complete(prompt, vllm_xargs={"choreo_auto": "exact"})
        (choice,) = exact["choices"]
        (text,) = complete(choice["prompt_token_ids"])["choices"]
        assert choice["token_ids"] == text["token_ids"] and exact["usage"]["exact"]
    assert exact["choreo"]["auto"]["found"] == exact["choreo"]["auto"]["parts"] == 3
    assert len(complete(prompt, vllm_xargs={"choreo_auto": "off"})["choices"]) == 4  # a batch
    body = {"model": server.model, "prompt": "Hm", "vllm_xargs": {"choreo_auto": "exact"}}
    refused = alpha.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_metrics_tell_what_was_found(server: Server, ask: Ask) -> None:
    def numbers() -> dict[str, float]:
        with server.client() as client:
            page = client.get("/metrics").text
        found = re.findall(r"^vllm_choreo:(auto_\w+?)_total\{(.*?)\} (.*)$", page, re.MULTILINE)
        return {
            name + "".join(re.findall('outcome="(.*?)"', at)): float(v) for name, at, v in found
        }

    chat, before = reading([2, 1], "metrics"), numbers()
    told = [ask(chat, "exact")["choreo"]["auto"] for _ in range(2)]
    change = {name: value - before[name] for name, value in numbers().items()}
    assert {name: value for name, value in change.items() if value} == {
        "auto_chatsmessages": 2.0,
        "auto_found_messages": told[1]["found"],
        "auto_new_messages": told[0]["parts"],
        "auto_found_tokens": told[1]["found_tokens"],
        "auto_new_tokens": told[0]["new_tokens"],
    }


def test_the_page_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples of a client; the other one is in process: tests/engine/test_auto.py."""
    chats, _, *others = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    example = "\n".join([chats, *others]).replace("http://localhost:8000", server.base_url)
    exec(compile(example.replace("secret", KEYS[0]), "docs/on-ramps.md", "exec"), {})
    assert "'found': 5" in capsys.readouterr().out
