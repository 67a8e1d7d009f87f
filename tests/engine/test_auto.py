# SPDX-License-Identifier: Apache-2.0
"""`Choreography.chat` on a real engine, and the benchmark of chats that name no messages."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_choreo import Choreography
from vllm_choreo.errors import ChoreoError, DeniedMessageError
from vllm_choreo.testing.models.tiny import EOS_TOKEN_ID

# Of the tokenizer's words, those that do not begin with one of its special tokens, `t0` to `t2`.
WORDS = [number for number in range(30, 500) if str(number)[0] > "2"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, allowed_token_ids=WORDS)
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 't5', 'user': 't6', 'assistant': 't7'}[m.role] }} "
    "{{ m.content }} t<END> {% endfor %}t7 "
).replace("<END>", str(EOS_TOKEN_ID))
DOCS = (Path(__file__).parents[2] / "docs" / "on-ramps.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llm(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """An engine whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chats") / "llama"
    shutil.copytree(tiny_model_path("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return engine_slot(folder)


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as choreography:
        yield choreography


def words(seed: int, count: int = 40) -> str:
    return " ".join(f"t{number}" for number in random.Random(seed).choices(WORDS, k=count))


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def plain(llm: Any, chat: list[dict[str, str]]) -> list[int]:
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_a_conversation_says_what_llm_chat_says_and_encodes_nothing_twice(
    llm: Any, c: Choreography
) -> None:
    chat, before = [turn("system", words(1)), turn("user", words(2))], 0
    for number in range(3):
        answer = c.chat(chat, sampling_params=GREEDY)
        assert list(answer.generated_token_ids) == plain(llm, chat)
        usage = answer.usage
        assert usage.exact and usage.reused_tokens == before
        before = usage.reused_tokens + usage.encoded_tokens
        chat += [turn("assistant", answer.generated_text), turn("user", words(10 + number))]


def test_other_orders_say_what_llm_chat_says_or_read_all_as_it_is(
    llm: Any, c: Choreography
) -> None:
    system, *documents = turn("system", words(1)), *(turn("user", words(n)) for n in (2, 3, 4))
    first, other = [system, *documents], [system, *reversed(documents)]
    for chat in (first, other, first):
        assert list(c.chat(chat, sampling_params=GREEDY).generated_token_ids) == plain(llm, chat)
    free = c.chat(other, auto="choreo", sampling_params=GREEDY)
    assert not free.usage.exact and free.usage.repositioned_tokens > 0
    assert free.usage.encoded_tokens == free.num_tokens  # its header, and what it says
    repaired = c.chat(other, auto="choreo", repair="first:4", sampling_params=GREEDY)
    assert repaired.usage.repaired_tokens > 0
    off = c.chat(first, auto="off", sampling_params=GREEDY)
    assert off.parents == () and list(off.generated_token_ids) == plain(llm, first)


def test_what_is_pasted_into_one_turn_is_found_in_any_order(llm: Any, c: Choreography) -> None:
    """Cut by its content, a turn of several texts says what `LLM.chat` says, or reads them."""

    def pasted(first: int) -> list[list[dict[str, str]]]:
        texts = [words(first + n, 150) for n in range(3)]
        return [
            [turn("user", " ".join(texts[n] for n in order))] for order in ([0, 1, 2], [2, 0, 1])
        ]

    options: dict[str, Any] = {"sampling_params": GREEDY, "cut": "content"}
    for chat in pasted(31):
        exact = c.chat(chat, auto="exact", **options)
        assert list(exact.generated_token_ids) == plain(llm, chat) and exact.usage.exact
    chats = pasted(41)
    whole = c.chat(chats[0], auto="choreo", **options)
    read = c.chat(chats[1], auto="choreo", **options)
    assert whole.usage.reused_tokens == 0 and whole.usage.exact
    assert read.usage.repositioned_tokens > 0 and read.usage.reused_tokens > 60
    with pytest.raises(ChoreoError, match="choose one of") as caught:
        c.chat(chats[0], cut="sentences")
    assert caught.value.parameter == "cut"


def test_a_flood_stays_within_the_limits(c: Choreography) -> None:
    c._chats.book.max_messages = 6
    for seed in range(12):
        c.chat([turn("user", words(100 + seed)), turn("user", words(200 + seed))])
        assert len(c._chats.book) <= 6 and len(c._entries.messages()) <= 6


def test_a_view_that_denies_a_message_denies_what_has_read_it(c: Choreography) -> None:
    chat = [turn("system", words(1)), turn("user", words(2))]
    answer = c.chat(chat, auto="choreo", sampling_params=GREEDY)
    secret = answer.parents[0].id
    with pytest.raises(DeniedMessageError):
        c.deny(secret).chat(chat, auto="choreo", sampling_params=GREEDY)


def test_what_is_no_mode_is_refused(c: Choreography) -> None:
    with pytest.raises(ChoreoError, match="choose one of"):
        c.chat([turn("user", "t30")], auto="always")


def test_the_page_runs(llm: Any) -> None:
    """The example in process; the others are a client's: tests/server/test_auto.py."""
    _, example, *_ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(compile(example, "docs/on-ramps.md", "exec"), {"llm": llm})
