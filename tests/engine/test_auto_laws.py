# SPDX-License-Identifier: Apache-2.0
"""Laws of chats that name no messages: exact is text, and with "alone" nobody steers another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.test_auto import llm, turn, words
from tests.engine.test_exact import assert_equals_requests
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

__all__ = ["llm"]  # the fixture

Chat = list[dict[str, str]]
GROUP = 10  # chats of one session, each of which finds what those before it have left
LOGGED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20)


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as choreography:
        yield choreography


# -- exact is text ---------------------------------------------------------------------------------


def _edited(rng: random.Random, text: str) -> str:
    split = text.split()
    at = rng.randrange(len(split))
    split[at : at + rng.choice((0, 1, 3))] = words(rng.randrange(99), rng.choice((1, 2))).split()
    return " ".join(split)


def _chat(rng: random.Random, texts: list[str]) -> Chat:
    """Texts that others have, too, in any order and by any role; some of them edited, or pasted
    into one turn.
    """
    chat = [turn("system", rng.choice(texts[:2]))] if rng.random() < 0.6 else []
    for _ in range(rng.randrange(1, 4)):
        pasted = " ".join(rng.choices(texts, k=rng.choice((1, 1, 1, 2))))
        text = _edited(rng, pasted) if rng.random() < 0.3 else pasted
        chat.append(turn(rng.choice(("user", "user", "assistant")), text))
    return [*chat, turn("user", words(rng.randrange(100, 104), 6))]


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "cut": rng.choice(("messages", "content", "content")),
        "min_tokens": rng.choice((None, None, 1, 60)),
    }


@pytest.mark.parametrize("seed", sampled(range(20), 1))
def test_random_chats_are_text(llm: Any, c: Choreography, seed: int) -> None:
    """In mode "exact", whatever other chats of the session have left: tokens and logprobs."""
    rng = random.Random(seed)
    texts = [words(200 + 10 * seed + n, rng.choice((20, 60, 160))) for n in range(6)]
    tokenizer, prompts, answers = llm.get_tokenizer(), [], []
    for _ in range(GROUP):
        # What these read and leave is not text, and no exact answer may be made of it.
        c.chat(
            _chat(rng, texts),
            auto="choreo",
            context=rng.choice(("seen", "alone")),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=2),
            **_options(rng),
        )
        chat = _chat(rng, texts)
        answer = c.chat(chat, sampling_params=LOGGED, **_options(rng))
        assert answer.usage.exact
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(rendered, add_special_tokens=False))
        answers.append(answer)
    assert_equals_requests(llm, prompts, answers)


# -- whose context ---------------------------------------------------------------------------------

SYSTEM, DOCUMENT, HOSTILE = words(1), words(2, 60), words(3)
HALVES = DOCUMENT[: len(DOCUMENT) // 2], DOCUMENT[len(DOCUMENT) // 2 :]
VICTIM = [turn("system", SYSTEM), turn("user", DOCUMENT), turn("user", words(4))]
ATTACKS = [
    [turn("system", SYSTEM), turn("user", HOSTILE), turn("user", DOCUMENT)],
    [turn("system", HOSTILE), turn("user", DOCUMENT), turn("user", words(4))],
    [turn("system", SYSTEM), turn("user", f"{HALVES[0]}{words(5, 5)} {HALVES[1]}")],
    [turn("system", SYSTEM), turn("assistant", HOSTILE), turn("user", DOCUMENT)],
]


def _distance(llm: Any, attack: Chat | None, **options: Any) -> tuple[float, int]:
    """The largest difference in log-probability of the victim's answer to that without an attack,
    and the tokens that it found.
    """
    options |= {"cut": "content", "min_tokens": 1, "sampling_params": LOGGED}
    answers = []
    for chats in ([VICTIM], [*([attack] if attack else []), VICTIM]):
        with Choreography(llm) as c:
            answers.append([c.chat(chat, **options) for chat in chats][-1])
    one, other = answers
    differences = [
        abs(a[token].logprob - b[token].logprob)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
        for token in a.keys() & b.keys()
    ]
    assert differences
    return max(differences), other.usage.reused_tokens


@pytest.mark.parametrize("attack", range(len(ATTACKS)))
def test_with_alone_no_conversation_steers_another(llm: Any, attack: int) -> None:
    seen, found = _distance(llm, ATTACKS[attack], auto="choreo", context="seen")
    assert seen > 20 * LOGPROB_TOLERANCE and found > 20
    for options in ({"auto": "choreo", "context": "alone"}, {"auto": "exact"}):
        distance, _ = _distance(llm, ATTACKS[attack], **options)
        assert distance < LOGPROB_TOLERANCE, options


def test_with_alone_documents_are_found_in_any_order(c: Choreography) -> None:
    documents = [turn("user", words(30 + n)) for n in range(3)]
    options: dict[str, Any] = {"auto": "choreo", "context": "alone", "sampling_params": LOGGED}
    first = c.chat([turn("system", SYSTEM), *documents], **options)
    again = c.chat([turn("system", SYSTEM), *reversed(documents)], **options)
    assert not first.usage.exact and first.usage.reused_tokens == 0
    assert again.usage.encoded_tokens == again.num_tokens  # its header, and what it says
    # Its own answer is found by the conversation that goes on.
    said = turn("assistant", again.generated_text)
    chat = [turn("system", SYSTEM), *reversed(documents), said, turn("user", words(40))]
    on = c.chat(chat, **options)
    assert on.usage.reused_tokens >= again.usage.reused_tokens


def test_an_edited_line_is_encoded_alone(llm: Any, c: Choreography) -> None:
    options: dict[str, Any] = {"auto": "choreo", "cut": "content", "sampling_params": LOGGED}
    before, behind = words(50), words(51)
    chats = [
        [turn("system", f"{before} t{number} {behind}"), turn("user", words(52))]
        for number in (30, 31, 32)
    ]
    for answer in [c.chat(chat, **options) for chat in chats][1:]:
        assert answer.usage.encoded_tokens < answer.num_tokens + 16
        assert answer.usage.reused_tokens > 80 and not answer.usage.exact
    # In other modes and without cuts the whole message is another one.
    for number, others in enumerate(({"auto": "exact"}, {"cut": "messages"})):
        chat = [turn("system", f"{before} t7{number} {behind}"), turn("user", words(52))]
        answer = c.chat(chat, **{**options, **others})
        assert answer.usage.encoded_tokens > 80
    with Choreography(llm) as other:  # of whom nothing is read in parts
        assert other.chat(chats[1], **options).usage.reused_tokens == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"auto": "choreo", "context": "alien"}, ChoreoError),
        ({"auto": "exact", "context": "alone"}, UnsupportedOptionError),
    ],
)
def test_what_is_no_context_is_refused(
    c: Choreography, options: dict[str, Any], error: type[ChoreoError]
) -> None:
    with pytest.raises(error) as caught:
        c.chat(VICTIM, **options)
    assert caught.value.parameter == "context"
