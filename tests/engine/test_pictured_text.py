# SPDX-License-Identifier: Apache-2.0
"""Pictures in programs that are text to the engine: baseline mode, and chats in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.pictured import OPTIONS, picture
from vllm_choreo import Choreography
from vllm_choreo.errors import SpanError, UnsupportedOptionError
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.testing.laws import difference, greedy
from vllm_choreo.testing.models.pictured import PICTURED_MODELS

# `t2` ends a turn, as it ends a text of the tiny models.
_TEMPLATE = """{% for turn in messages %}{% if turn.role == 'assistant' %}t3 {% endif %}\
{% if turn.content is string %}{{ turn.content }}{% else %}\
{% for part in turn.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}\
{% endif %}{{ ' ' }}{% endfor %}{% endif %}{{ ' t2 ' }}{% endfor %}\
{% if add_generation_prompt %}t3 {% endif %}"""
_PICTURES = [picture(1), picture(2, (112, 56)), picture(3)]
_WORDS = [" ".join(f"t{n}" for n in range(first, first + 20)) for first in (10, 60, 110)]


@pytest.fixture(scope="module", params=sorted(PICTURED_MODELS))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = PICTURED_MODELS[request.param](tmp_path_factory.mktemp("pictured"))
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    return path


@pytest.fixture
def llm(engine_slot: Callable[..., Any], model_path: Path) -> Any:
    return engine_slot(model_path, **OPTIONS)


def _same(left: Any, right: Any) -> None:
    assert difference(left, right) < LOGPROB_TOLERANCE


def _ordinary(llm: Any, text: str, pictures: list[Any]) -> Any:
    request = {"prompt": text, "multi_modal_data": {"image": pictures}}
    (output,) = llm.generate(request, greedy(), use_tqdm=False)
    return output.outputs[0]


def _made(c: Choreography, number: int, **options: Any) -> Any:
    data = {"image": _PICTURES[number]}
    return c.prefill(f"{_WORDS[number]} <image> t9", multi_modal_data=data, **options)


def test_the_baseline_shows_the_pictures_of_what_it_reads(llm: Any) -> None:
    """In headers and parents, in parts around them, in copies, and in answers that are read."""
    texts = [f"{words} <image> t9" for words in _WORDS]
    with Choreography(llm, mode="baseline") as c:
        first, second, _ = messages = [_made(c, number) for number in range(3)]
        assert [message.num_pictures for message in messages] == [1] * 3
        question: dict[str, Any] = {"header": "t7 t8", "sampling_params": greedy()}
        answer = c.decode(parents=messages, **question)
        _same(answer, _ordinary(llm, " ".join([*texts, "t7 t8"]), _PICTURES))
        copy = c.reencode(second)
        parents = [(first, 0, 7), copy, (first, 17, None), second]
        answer = c.decode(
            "t7 <image>",
            parents=parents,
            multi_modal_data={"image": _PICTURES[2]},
            sampling_params=greedy(),
        )
        parts = _WORDS[0].split()
        text = [*parts[:7], texts[1], *parts[17:], "<image> t9", texts[1], "t7 <image>"]
        shown = [_PICTURES[n] for n in (1, 0, 1, 2)]
        _same(answer, _ordinary(llm, " ".join(text), shown))
        again = c.decode(parents=[answer], **question)
        said = f"t7 <image> {answer.generated_text.strip()} t7 t8"
        _same(again, _ordinary(llm, said, _PICTURES[2:]))
        with pytest.raises(SpanError, match="name all of its tokens, which are 20"):
            c.decode(parents=[(first, 3, 22)], **question)
        with pytest.raises(UnsupportedOptionError, match="as a whole"):
            c.reencode((first, 0, 12))
        c.free(*messages, copy, answer, again)
        assert not c._entries._pictures


def test_a_servers_baseline_has_no_pictures(llm: Any) -> None:
    from vllm_choreo.api.pictures import PictureRenderer
    from vllm_choreo.api.session import Session
    from vllm_choreo.semantics.call import asked

    limits: Any = SimpleNamespace(max_messages_per_session=9, max_tokens_per_session=9)
    options = SessionOptions(mode="baseline", limits=limits)
    engine = llm.llm_engine
    session = Session(llm.get_tokenizer(), engine.vllm_config, options)
    calls = asked("prefill", "t5 <image>", {"multi_modal_data": {"image": _PICTURES[0]}}).calls
    for render in (
        PictureRenderer(session, engine).render,
        lambda calls: asyncio.run(PictureRenderer(session, engine).render_async(calls)),
    ):
        with pytest.raises(UnsupportedOptionError, match="run the program in process"):
            render(calls)


def _turn(number: int) -> dict[str, Any]:
    """A turn of words, a picture, and words."""
    parts = [
        {"type": "text", "text": _WORDS[number]},
        {"type": "image_pil", "image_pil": _PICTURES[number]},
        {"type": "text", "text": _WORDS[2 - number]},
    ]
    return {"role": "user", "content": parts}


@pytest.mark.parametrize("auto", ["off", "exact", "choreo"])
def test_a_chat_finds_its_pictures_by_what_they_show(llm: Any, auto: str) -> None:
    """It says what `LLM.chat` says, and encodes nothing twice; an equal place with another picture
    is another message.
    """
    with Choreography(llm) as c:
        chat, before = [_turn(0)], 0
        for number in range(3):
            answer = c.chat(chat, auto=auto, sampling_params=greedy())
            (output,) = llm.chat(chat, greedy(), use_tqdm=False)
            _same(answer, output.outputs[0])
            if auto != "off":
                assert answer.usage.reused_tokens == before
            before = answer.usage.reused_tokens + answer.usage.encoded_tokens
            said = {"role": "assistant", "content": answer.generated_text.removesuffix(" t2")}
            chat += [said, _turn(number) if number == 1 else {"role": "user", "content": _WORDS[1]}]
        other = [{**_turn(0), "content": [*_turn(0)["content"]]}]
        other[0]["content"][1] = {"type": "image_pil", "image_pil": _PICTURES[2]}
        answer = c.chat(other, auto=auto, sampling_params=greedy())
        (output,) = llm.chat(other, greedy(), use_tqdm=False)
        _same(answer, output.outputs[0])
        # The words before the picture are a part of their own.
        assert auto == "off" or answer.usage.reused_tokens == len(_WORDS[0].split())


def test_a_baseline_chat_shows_its_pictures(llm: Any) -> None:
    with Choreography(llm, mode="baseline") as c:
        answer = c.chat([_turn(0)], sampling_params=greedy())
    (output,) = llm.chat([_turn(0)], greedy(), use_tqdm=False)
    _same(answer, output.outputs[0])
