# SPDX-License-Identifier: Apache-2.0
"""`--choreo-auto exact` under the chat templates of six families: the tokens of plain text.

One server with the special tokens of all of them; each request brings its template.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES
from tests.engine.adapters import Adapter
from tests.engine.byte_model import CHATML, make_byte_model
from tests.server.chats import Chat, ask_chat, said, tokens_of, turn
from tests.server.serving import QUICK
from vllm_choreo.testing.server import Server, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own

SPECIAL = tuple(dict.fromkeys((*CHATML, *(t for f in FAMILIES.values() for t in f.tokens))))
ENDS = tuple(dict.fromkeys(family.end for family in FAMILIES.values()))
# Answers of letters, which are read as they were written; any of these may end them.
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *ENDS]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("families"), SPECIAL, ENDS)


@pytest.fixture(scope="module")
def allowed(model_path: Path) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model_path).convert_tokens_to_ids(LETTERS))


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose requests read messages unless they say otherwise, with an adapter."""
    folder = tmp_path_factory.mktemp("server")
    adapter = Adapter(model_path, folder, 1)
    options = {
        "choreo_auto": "exact",
        "trust_request_chat_template": True,
        "enable_lora": True,
        "lora_modules": f"writer={adapter.path}",
        **QUICK,
    }
    with start_server(model_path, folder, **options) as running:
        yield running


class Family:
    """Chats of a family, served by the server's option and as plain text."""

    def __init__(self, server: Server, name: str, allowed: list[int]) -> None:
        family = FAMILIES[name]
        template = family.template
        for variable, token in (("bos_token", family.bos), ("eos_token", family.eos)):
            template = template.replace(variable, f"'{token}'")
        self.server, self.name, self.family = server, name, family
        self.options = {"chat_template": template, "allowed_token_ids": allowed, "max_tokens": 20}

    def ask(self, chat: Chat, **options: Any) -> dict[str, Any]:
        """What the server answers on its own account; its tokens are those of plain text."""
        options = {**self.options, **options}
        answer = ask_chat(self.server, chat, **options)
        told = answer["choreo"]["auto"]
        assert told["mode"] == "exact" and "text" not in told
        assert answer["usage"]["exact"]
        text = ask_chat(self.server, chat, "off", **options)
        assert "choreo" not in text
        assert tokens_of(answer) == tokens_of(text)
        return answer


@pytest.fixture(params=FAMILIES)
def family(server: Server, allowed: list[int], request: pytest.FixtureRequest) -> Family:
    return Family(server, request.param, allowed)


def sentence(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefgh ü?", k=6)) for _ in range(8)).strip() + "."


def reused(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["reused_tokens"])


@pytest.mark.parametrize("has_system", [True, False])
def test_a_conversation_has_the_tokens_of_plain_text(family: Family, has_system: bool) -> None:
    """Streamed or whole; what came before is read wherever the template writes it as it was."""
    rng = random.Random(f"{family.name} {has_system}")
    chat = [turn("system", sentence(rng))] if has_system else []
    chat.append(turn("user", sentence(rng)))
    found = []
    for number in range(4):
        answer = family.ask(chat, stream=number == 2)
        found.append(reused(answer))
        chat = [*chat, said(answer), turn("user", sentence(rng))]
    assert found[0] == 0 or family.name in ("llama3", "gpt_oss", "smollm2")  # turns of their own
    if not (family.name == "mistral" and has_system):
        assert found[1:] == sorted(set(found[1:])) and found[1] > 0


def test_agents_over_one_history_have_the_tokens_of_plain_text(family: Family) -> None:
    """Each with a system text of its own, and again: then all but the header is read."""
    rng = random.Random(f"agents {family.name}")
    history = [turn("user", sentence(rng)), turn("assistant", sentence(rng))]
    chats = [
        [turn("system", sentence(rng)), *history, turn("user", sentence(rng))] for _ in range(3)
    ]
    for chat in chats:
        family.ask(chat)
    for chat in chats:
        answer = family.ask(chat)
        told = answer["choreo"]["auto"]
        assert told["found"] == told["parts"] and reused(answer) == told["found_tokens"]


@pytest.mark.parametrize("name", [name for name, f in FAMILIES.items() if not f.alternates])
def test_documents_in_any_order_have_the_tokens_of_plain_text(
    server: Server, allowed: list[int], name: str
) -> None:
    family, rng = Family(server, name, allowed), random.Random(f"documents {name}")
    system, *documents, question = (sentence(rng) for _ in range(5))
    told = []
    for _ in range(4):
        chat = [turn("system", system), *(turn("user", text) for text in documents)]
        told.append(family.ask([*chat, turn("user", question)])["choreo"]["auto"])
        rng.shuffle(documents)
    assert all(one["found"] == one["parts"] for one in told[1:])


def test_an_adapter_has_messages_of_its_own(family: Family) -> None:
    """And the tokens of the plain text that it answers."""
    rng = random.Random(f"adapter {family.name}")
    chat = [turn("user", sentence(rng))]
    first = family.ask(chat, model="writer")
    more = [*chat, said(first), turn("user", sentence(rng))]
    second = family.ask(more, model="writer")
    base = family.ask(more)
    assert tokens_of(base)[0] == tokens_of(second)[0]
    assert base["choreo"]["auto"]["found"] < base["choreo"]["auto"]["parts"]
    assert reused(second) > reused(base)
