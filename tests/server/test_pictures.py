# SPDX-License-Identifier: Apache-2.0
"""Pictures over HTTP on a real server: our routes and client, vLLM's routes, chats, refusals.

What is expected is what the same server answers to an ordinary request on the whole chat.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.pictured import picture
from tests.server.serving import QUICK, Session
from vllm_choreo import ChoreoClient, ChoreoError
from vllm_choreo.errors import LimitError, UnsupportedOptionError
from vllm_choreo.testing.models.pictured import make_idefics3
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
# Words of parts one after the other; a token that ends what is generated behind each turn.
_TEMPLATE = """{% for turn in messages %}\
{% if turn.content is string %}{{ turn.content }}{% else %}\
{% for part in turn.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}\
{% endif %}{{ ' ' }}{% endfor %}{% endif %}{{ ' t2 ' }}{% endfor %}\
{% if add_generation_prompt %}t3 {% endif %}"""
_PICTURES = [picture(1), picture(2, (112, 56)), picture(3)]
_SIZE = 5 * 56 * 56 * (3 * 4 + 8) + 8  # bytes that the encoder is given of the first and the third
_WORDS = [" ".join(f"t{n}" for n in range(first, first + 20)) for first in (10, 60, 110)]
_SAMPLING = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A web server with the first picture; its port."""
    folder = tmp_path_factory.mktemp("web")
    _PICTURES[0].save(folder / "a.png")
    with HTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served.server_port
        served.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "template.jinja").write_text(_TEMPLATE)
    options = {
        **QUICK,
        "chat_template": str(folder / "template.jinja"),
        "chat_template_content_format": "openai",
        "limit_mm_per_prompt": {"image": 4},
        "allowed_media_domains": ["127.0.0.1"],
        "settings": {"picture_memory_gib": 16.5 * _SIZE / 2**30},
        "enable_auto_tool_choice": None,
        "tool_call_parser": None,
    }
    with start_server(make_idefics3(folder), folder, **options) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[ChoreoClient]:
    with ChoreoClient(server.base_url, api_key=KEYS[0]) as opened:
        yield opened


def _url(shown: Image.Image) -> str:
    png = io.BytesIO()
    shown.save(png, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _turn(number: int, *shown: Image.Image, end: str = "t7 t8", **more: Any) -> dict[str, Any]:
    """A user's turn; `end` keeps those of a test apart from those of others."""
    parts = [{"type": "image_url", "image_url": {"url": _url(p)}, **more} for p in shown]
    words = {"type": "text", "text": f"{_WORDS[number]} {end}"}
    return {"role": "user", "content": [words, *parts, {"type": "text", "text": end}]}


def _chat(server: Server, messages: Any, key: str = KEYS[0], **xargs: Any) -> httpx.Response:
    body = {
        **{"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 6},
        **{"ignore_eos": True, "logprobs": True, "return_token_ids": True},
        **({"vllm_xargs": {f"choreo_{name}": xargs[name] for name in xargs}} if xargs else {}),
    }
    with server.client(key) as client:
        return client.post("/v1/chat/completions", json=body)


def _answered(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _of_chat(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    (choice,) = answer["choices"]
    return choice["token_ids"], [found["logprob"] for found in choice["logprobs"]["content"]]


def _of_message(message: Any) -> tuple[list[int], list[float]]:
    ids = list(message.generated_token_ids)
    return ids, [at[token].logprob for at, token in zip(message.logprobs, ids, strict=True)]


def _same(found: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=LOGPROB_TOLERANCE)


def test_our_client_and_routes_give_what_the_chat_gives(server: Server, web: int) -> None:
    """Text with placeholders by our client; turns with `image_url`, and an address, by JSON."""
    turns = [_turn(0, _PICTURES[0]), _turn(1, *_PICTURES[1:])]
    expected = _of_chat(_answered(_chat(server, turns)))
    texts = [
        f"{_WORDS[0]} t7 t8 <image> t7 t8 t2",
        f"{_WORDS[1]} t7 t8 <image> <image> t7 t8 t2 t3",
    ]
    with ChoreoClient(server.base_url, api_key=KEYS[0]) as c:
        first = c.prefill(texts[0], multi_modal_data={"image": _PICTURES[0]})
        assert first.num_pictures == 1 and first.text == texts[0]
        shown = {"image": _PICTURES[1:]}
        options = {"parents": [first], "multi_modal_data": shown, "sampling_params": _SAMPLING}
        answer = c.decode(texts[1], **options)
        assert answer.usage.exact and answer.num_pictures == 2
        _same(_of_message(answer), expected)
        (stored,) = (m for m in (c.message(first),) if m.num_pictures)
        assert stored.token_ids == first.token_ids
        url = {"image": f"http://127.0.0.1:{web}/a.png"}
        again = c.prefill(texts[0], multi_modal_data=url)
        assert again.token_ids == first.token_ids and again.usage.reused_tokens == 32
    with server.client(KEYS[0]) as http, server.client(KEYS[1]) as other:
        session = Session(http)
        made = session.call(type="prefill", messages=[turns[0]], save_as="turn")
        assert made["token_ids"] == list(first.token_ids) and made["num_pictures"] == 1
        found = session.call(messages=[turns[1]], parents=["turn"], sampling_params=_SAMPLING)
        ids = found["generated_token_ids"]
        logprobs = [at[str(t)]["logprob"] for at, t in zip(found["logprobs"], ids, strict=True)]
        _same((ids, logprobs), expected)
        hidden = Session(other).call(type="prefill", messages=[turns[0]])
        assert hidden["usage"]["reused_tokens"] == 0, "of another tenant"


def test_parents_of_chats_on_vllms_route(server: Server, client: ChoreoClient) -> None:
    turns = [_turn(0, _PICTURES[0]), _turn(1, _PICTURES[1])]
    expected = _of_chat(_answered(_chat(server, turns)))
    text = f"{_WORDS[0]} t7 t8 <image> t7 t8 t2"
    first = client.prefill(text, multi_modal_data={"image": _PICTURES[0]}, save_as="first")
    named = {"session": client.session, "parents": ["first"]}
    _same(_of_chat(_answered(_chat(server, turns[1:], **named))), expected)
    # The prefix may have no pictures, for its tokens are those of any.
    refused = _chat(server, turns, prefix=list(first.token_ids), **named)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "PrefixError"
    assert refused.json()["error"]["param"] == "vllm_xargs.choreo_prefix"
    before = list(first.token_ids[:20])
    client.prefill(before, save_as="words")
    whole = _chat(server, turns, session=client.session, parents=["words"], prefix=before)
    _same(_of_chat(_answered(whole)), expected)


def test_a_name_that_a_client_gives_a_picture_means_nothing(server: Server) -> None:
    for shown in (_PICTURES[0], _PICTURES[2]):
        expected = _of_chat(_answered(_chat(server, [_turn(0, shown)])))
        named = _chat(server, [_turn(0, shown, uuid="mine")], session=_session(server))
        _same(_of_chat(_answered(named)), expected)
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "mine"}]}
    refused = _chat(server, [turn], session=_session(server))
    assert refused.status_code == 400 and "uuid" in refused.text


def _session(server: Server) -> str:
    with server.client(KEYS[0]) as client:
        return Session(client).id


def test_what_is_wrong_is_named(server: Server, client: ChoreoClient, web: int) -> None:
    text = f"{_WORDS[0]} <image>"
    for shown, reason in (
        ("data:image/png;base64,AAAA", "does not load"),
        (f"http://localhost:{web}/a.png", "127.0.0.1"),  # no permitted domain
        ("file:///etc/passwd", "allowed-local-media-path"),
        (b"png", "PIL image, a numpy array or an address"),
        (_PICTURES[0].convert("CMYK"), "convert"),
        ([_PICTURES[0]] * 2, "there are 1"),
        ([_PICTURES[0]] * 5, "At most 4"),
    ):
        with pytest.raises(ChoreoError, match=reason) as caught:
            client.prefill(text, multi_modal_data={"image": shown})
        assert caught.value.parameter == "multi_modal_data"
    with pytest.raises(UnsupportedOptionError, match="under the key"):
        client.prefill(text, multi_modal_data={"audio": 1})
    refused = pytest.raises(UnsupportedOptionError, match="baseline mode")
    with ChoreoClient(server.base_url, api_key=KEYS[0], mode="baseline") as c, refused:
        c.prefill(text, multi_modal_data={"image": _PICTURES[0]})
    with server.client(KEYS[0]) as http:
        session = Session(http)
        for body in (
            {"messages": [_turn(0)], "multi_modal_data": {"image": "data:"}},
            {"content": text, "multi_modal_data": {"image": []}},
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            {"messages": [_turn(0, _PICTURES[0], detail="high")]},
        ):
            answer = session.post(body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "ChoreoError"


def test_memory_for_pictures_is_limited(client: ChoreoClient) -> None:
    """And comes back when messages are freed; the server goes on."""
    made = []
    with pytest.raises(LimitError, match="picture_memory_gib"):
        for seed in range(100, 130):
            shown = {"image": picture(seed)}
            made.append(client.prefill(f"{_WORDS[0]} <image>", multi_modal_data=shown))
    assert made
    client.free(*made)
    shown = {"image": picture(130)}
    assert client.prefill(f"{_WORDS[0]} <image>", multi_modal_data=shown).num_pictures == 1


@pytest.mark.parametrize("how", [{}, {"auto_cut": "content", "auto_min_tokens": 1}], ids=str)
def test_chats_find_pictures_by_what_they_show(server: Server, how: dict[str, Any]) -> None:
    """In exact mode the answer is that of the chat, whatever was found; by no other tenant."""
    end = f"t{210 + len(how)} t8"
    tag = {"role": "system", "content": f"t200 {_WORDS[2]} {end}"}
    talk = [tag, _turn(0, _PICTURES[0], end=end), _turn(1, _PICTURES[1], end=end)]
    talk.append(_turn(2, end=end))
    other = [tag, _turn(0, _PICTURES[2], end=end), *talk[2:]]
    for chat, num_new in ((talk, True), (talk, False), (other, True), (talk, False)):
        expected = _of_chat(_answered(_chat(server, chat)))
        answer = _answered(_chat(server, chat, auto="exact", **how))
        _same(_of_chat(answer), expected)
        told = answer["choreo"]["auto"]
        assert answer["usage"]["exact"] and told["parts"] >= 3, told
        assert (told["new_tokens"] > 0) == num_new, told
        assert answer["prompt_token_ids"] == _answered(_chat(server, chat))["prompt_token_ids"]
    told = _answered(_chat(server, talk, KEYS[1], auto="exact", **how))["choreo"]["auto"]
    assert told["found"] == 0


def test_a_conversation_about_pictures_goes_on(server: Server) -> None:
    """Also in mode choreo, in which a picture is read wherever it was first seen."""
    end = "t300 t8"
    talk = [{"role": "system", "content": f"t300 {_WORDS[2]}"}, _turn(0, _PICTURES[0], end=end)]
    num_before = 1
    for number in range(3):
        plain, exact = _chat(server, talk), _chat(server, talk, auto="exact")
        _same(_of_chat(_answered(exact)), _of_chat(_answered(plain)))
        told = _answered(exact)["choreo"]["auto"]
        # What was said before is found, but for its end, behind which the answer stands now.
        assert num_before - 1 <= told["found"] < told["parts"], told
        num_before = told["parts"]
        said = _answered(plain)["choices"][0]["message"]["content"]
        talk += [{"role": "assistant", "content": said}, _turn(number, _PICTURES[number], end=end)]
    first, second = (_turn(n, _PICTURES[n], end="t301") for n in range(2))
    question = _turn(2, end="t301")
    for chat in ([first, second, question], [second, first, question]):
        answer = _answered(_chat(server, chat, auto="choreo"))
        told = answer["choreo"]["auto"]
        assert not told.get("text")
    assert told["found"] == told["parts"] >= 5 and not answer["usage"]["exact"]


def test_chats_give_memory_for_pictures_up(server: Server, client: ChoreoClient) -> None:
    """Their table keeps pictures in half of a tenant's memory, which are 8 of them."""
    chats = [[_turn(0, picture(seed), end="t302"), _turn(1)] for seed in range(200, 212)]
    for chat in (*chats, chats[0]):
        expected = _of_chat(_answered(_chat(server, chat)))
        answer = _answered(_chat(server, chat, auto="exact"))
        _same(_of_chat(answer), expected)
        assert answer["choreo"]["auto"]["new_tokens"] > 0, "the first was given up meanwhile"
    made = []
    with pytest.raises(LimitError):
        for seed in range(220, 240):
            shown = {"image": picture(seed)}
            made.append(client.prefill(f"{_WORDS[0]} <image>", multi_modal_data=shown))
    chat = [_turn(0, picture(250), end="t303"), _turn(1)]
    refused = _chat(server, chat, KEYS[1], auto="exact")  # whose chats have nothing to give up
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "LimitError"
    client.free(*made)


def test_videos_and_sound_are_refused_in_chats(server: Server) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    refused = _chat(server, [{"role": "user", "content": [sound]}], auto="exact")
    assert refused.status_code == 400, refused.text
