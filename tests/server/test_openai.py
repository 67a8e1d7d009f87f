# SPDX-License-Identifier: Apache-2.0
"""Choreography on vLLM's own routes, from the unmodified OpenAI client."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.server.openai_calls import Caller, plain, text_of, tokens_of
from tests.server.serving import Session, leave, num_generated
from vllm_choreo.testing.server import Server

ROOT = Path(__file__).parents[2]
ANNA = "Anna owns a red bicycle. Bob owns a blue car.\n"
SHED = "The shed behind the house is green.\n"
# Float32 sums in another order.
TOLERANCE = 5e-4


@pytest.fixture
def call(server: Server, session: Session) -> Caller:
    """Calls in a session of their own."""
    return Caller(server, session.id)


# -- what a call gives ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("reader", ["completions", "chat"])
@pytest.mark.parametrize("maker", ["completions", "chat", "choreo"])
def test_parents_of_any_route_are_read_as_text(
    maker: str, reader: str, stream: bool, server: Server, session: Session, call: Caller
) -> None:
    """The chain law, on tokens: parents and prompt are one text, and none is encoded again."""
    options = {"stream": stream}
    if maker == "choreo":
        made = session.call(
            content=ANNA,
            save_as="p",
            sampling_params={"max_tokens": 6, "temperature": 0, "ignore_eos": True},
        )
        parent = made["token_ids"]
    else:
        made = call(maker, ANNA, save_as="p", options=options)
        parent = [token for tokens in tokens_of(made) for token in tokens]
        assert session.message("p").json()["token_ids"] == parent
        assert made["choreo"] == {"id": f"{session.id}/p", "session": session.id, "position": 0}
    answer = call(reader, "What colour is the car?", parents=["p"], options=options)
    prompt, generated = tokens_of(answer)
    assert answer["choreo"]["position"] == len(parent)
    assert generated == tokens_of(plain(server, [*parent, *prompt]))[1]
    usage = answer["usage"]
    details = usage.pop("prompt_tokens_details")
    assert details["cached_tokens"] == len(parent)
    expected = {
        "prompt_tokens": len(parent) + len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(parent) + len(prompt) + 6,
        "exact": True,
        "reused_tokens": len(parent),
        "repositioned_tokens": 0,
        "encoded_tokens": len(prompt) + 6,
    }
    assert {key: usage[key] for key in expected} == expected
    assert not answer.get("kv_transfer_params")
    stored = session.message(answer["choreo"]["id"].partition("/")[2]).json()
    assert stored["token_ids"] == [*prompt, *generated]
    assert stored["generated_text"] == text_of(answer)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_logprobs_are_those_of_the_text(route: str, server: Server, call: Caller) -> None:
    made = call("completions", ANNA, save_as="p", options={"stream": False})
    parent = [token for tokens in tokens_of(made) for token in tokens]
    wanted = {"logprobs": True, "top_logprobs": 2} if route == "chat" else {"logprobs": 2}
    answer = call(route, "So", parents=["p"], options=wanted)
    logprobs = answer["choices"][0]["logprobs"]
    found = (
        [entry["logprob"] for entry in logprobs["content"]]
        if route == "chat"
        else logprobs["token_logprobs"]
    )
    text = plain(server, [*parent, *tokens_of(answer)[0]], logprobs=2)
    expected = text["choices"][0]["logprobs"]["token_logprobs"]
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_spans_and_offsets(session: Session, call: Caller) -> None:
    call("completions", ANNA, save_as="p")
    answer = call(
        "chat", "Hm", parents=["p[2:5]", f"{session.id}/p[:3]", "p[4:]"], offsets=[7, 0, 20],
        new_offset=99,
    )  # fmt: skip
    num_tokens = session.message("p").json()["num_tokens"]
    stored = session.message("0").json()
    spans = [(parent["start"], parent["stop"]) for parent in stored["parents"]]
    assert spans == [(2, 5), (None, 3), (4, None)]
    assert stored["position"] == answer["choreo"]["position"] == 99
    usage = answer["usage"]
    assert usage["reused_tokens"] == 3 + 3 + num_tokens - 4
    assert usage["repositioned_tokens"] == usage["reused_tokens"] - 3  # p[:3] is where it was
    assert not usage["exact"]


def test_exact_mode_gives_what_the_text_gives(server: Server, call: Caller) -> None:
    texts = []
    for name, text in (("a", ANNA), ("b", SHED)):
        made = call("completions", text, save_as=name)
        texts += [token for tokens in tokens_of(made) for token in tokens]
    free = call("completions", "So", parents=["a", "b"])
    exact = call("completions", "So", parents=["a", "b"], mode="exact")
    assert exact["usage"]["exact"] and not free["usage"]["exact"]
    prompt, generated = tokens_of(exact)
    assert generated == tokens_of(plain(server, [*texts, *prompt]))[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_message_ends_where_a_stop_string_ended_it(
    stream: bool, server: Server, session: Session, call: Caller
) -> None:
    call("completions", ANNA, save_as="p")
    prompt = "One, two, three, four, five,"
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5}
    free = text_of(call("completions", prompt, parents=["p"], options=options))
    stop = next(word for word in re.findall(r"[A-Za-z]{4,}", free) if free.index(word) > 9)
    options["stop"] = [stop]
    body = call.body("completions", prompt, {"parents": ["p"], "save_as": "s"}, options)
    if stream:
        chunks = list(call.client.completions.create(**body, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        kept = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choreo["id"] == f"{session.id}/s"
    else:
        (choice,) = call.client.completions.create(**body).choices
        text, kept = choice.text, choice.token_ids
        assert choice.finish_reason == "stop"
    assert text == free[: free.index(stop)]
    stored = session.message("s").json()
    assert stored["generated_token_ids"] == kept and stored["generated_text"] == text
    parent = session.message("p").json()["token_ids"]
    answer = call("completions", " and then", parents=["p", "s"])
    assert answer["usage"]["exact"]
    header, generated = tokens_of(answer)
    whole = [*parent, *stored["token_ids"], *header]
    assert generated == tokens_of(plain(server, whole))[1]


# -- sessions and other calls --------------------------------------------------------------------


def test_default_session_belongs_to_the_key(server: Server) -> None:
    alpha, beta = (Caller(server, None, key) for key in server.keys)
    made = alpha("completions", ANNA, save_as="mine")
    try:
        again = alpha("chat", "Hm", parents=["mine"])
        assert again["choreo"]["session"] == made["choreo"]["session"]
        others = beta("completions", "Hm", parents=[])
        assert others["choreo"]["session"] != made["choreo"]["session"]
        refusals = []
        for parent in (made["choreo"]["id"], f"{'0' * 32}/mine"):
            with pytest.raises(openai.BadRequestError) as refused:
                beta("completions", "Hm", parents=[parent])
            refusals.append({**refused.value.body, "value": None})
        assert refusals[0] == refusals[1], "that it exists shows in nothing"
        for session in (made["choreo"]["session"], "0" * 32):
            with pytest.raises(openai.NotFoundError) as unknown:
                beta("completions", "Hm", session=session)
            refusals.append(unknown.value.body)
        assert refusals[2] == refusals[3]
    finally:
        for key, answer in zip(server.keys, (made, others), strict=True):
            with server.client(key) as client:
                client.delete(f"/v1/choreo/sessions/{answer['choreo']['session']}")


def test_child_waits_in_the_engine(server: Server, session: Session, call: Caller) -> None:
    """A call may name a message that is still being generated, or that waits itself."""
    num_tokens = 400  # for seconds, while the others only have to arrive
    client = AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key=server.keys[0], max_retries=0)

    async def read(route: str, options: dict[str, Any] | None = None, **keys: Any) -> list[Any]:
        create = (client.chat if route == "chat" else client).completions.create
        body = call.body(route, "Hm", keys, {"stream": True, **(options or {})})
        return [part async for part in await create(**body)]

    async def entered(name: str) -> None:
        while (await asyncio.to_thread(session.message, name)).status_code == 404:
            await asyncio.sleep(0.02)

    async def talk() -> list[list[Any]]:
        options = {"max_tokens": num_tokens}
        parent = asyncio.create_task(read("completions", options, save_as="p"))
        await entered("p")
        child = asyncio.create_task(read("chat", parents=["p"], save_as="child"))
        await entered("child")
        assert not parent.done()
        grandchild = asyncio.create_task(read("completions", parents=["p", "child"]))
        return await asyncio.gather(parent, child, grandchild)

    _, _, grandchild = asyncio.run(talk())
    parent, child = (session.message(name).json() for name in ("p", "child"))
    assert len(parent["generated_token_ids"]) == num_tokens
    assert child["usage"]["reused_tokens"] == parent["num_tokens"] and child["usage"]["exact"]
    position = grandchild[-1].choreo["position"]
    assert position == parent["num_tokens"] + child["num_tokens"]


def test_denied_traces(session: Session, call: Caller) -> None:
    call("completions", ANNA, save_as="secret")
    call("chat", "Hm", parents=["secret"], save_as="told")
    with pytest.raises(openai.BadRequestError) as refused:
        call("completions", "So", parents=["told"], deny=["secret"])
    assert refused.value.type == "DeniedMessageError"
    assert session.usage()["messages"] == 2


# -- errors --------------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    # keys, options -> param, status
    "unknown key": ({"parent": ["p"]}, {}, "vllm_xargs.choreo_parent", 400),
    "unknown parent": ({"parents": ["q"]}, {}, "vllm_xargs.choreo_parents", 400),
    "one parent": ({"parents": "p"}, {}, "vllm_xargs.choreo_parents", 400),
    "number": ({"parents": [0]}, {}, "vllm_xargs.choreo_parents", 400),
    "span": ({"parents": ["p[5:2]"]}, {}, "vllm_xargs.choreo_parents", 400),
    "no span": ({"parents": ["p[a:b]"]}, {}, "vllm_xargs.choreo_parents", 400),
    "too long": ({"parents": ["p"] * 300}, {}, "vllm_xargs.choreo_parents", 400),
    "too many": ({"parents": ["p"] * 100_001}, {}, "vllm_xargs.choreo_parents", 429),
    "float": ({"parents": ["p"], "offsets": [1.0]}, {}, "vllm_xargs.choreo_offsets", 400),
    "one offset": ({"parents": ["p"], "offsets": [1, 2]}, {}, "vllm_xargs.choreo_offsets", 400),
    "negative": ({"new_offset": -1}, {}, "vllm_xargs.choreo_new_offset", 400),
    "true": ({"new_offset": True}, {}, "vllm_xargs.choreo_new_offset", 400),
    "name": ({"save_as": "a/b"}, {}, "vllm_xargs.choreo_save_as", 400),
    "taken": ({"save_as": "p"}, {}, "vllm_xargs.choreo_save_as", 409),
    "itself": ({"save_as": "x", "parents": ["x"]}, {}, "vllm_xargs.choreo_parents", 400),
    "mode": ({"mode": "baseline"}, {}, "vllm_xargs.choreo_mode", 400),
    "deny": ({"deny": ["q"]}, {}, "vllm_xargs.choreo_deny", 400),
    "session": ({"session": "0" * 32}, {}, "vllm_xargs.choreo_session", 404),
    "sessions": ({"session": ["p"]}, {}, "vllm_xargs.choreo_session", 400),
    "n": ({}, {"n": 2}, "n", 400),
    "beams": ({}, {"use_beam_search": True}, "use_beam_search", 400),
    "echo": ({}, {"echo": True}, "echo", 400),
    "salt": ({}, {"cache_salt": "pepper"}, "cache_salt", 400),
}


@pytest.mark.parametrize("case", _REFUSED)
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_refused_calls_name_the_key(
    route: str, case: str, server: Server, session: Session, call: Caller
) -> None:
    keys, options, param, status = _REFUSED[case]
    session.call(type="prefill", content=ANNA, save_as="p")
    body = call.body(route, "Hm", keys, {})
    body.update(body.pop("extra_body"), **options)
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    with server.client() as client:
        for stream in (False, True):
            answer = client.post(path, json={**body, "stream": stream})
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, status)
            assert error["message"] and error["type"].endswith("Error")
    assert session.usage()["messages"] == 1


@pytest.mark.parametrize("is_choreographed", [True, False])
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_params_are_objects(
    name: str, is_choreographed: bool, server: Server, session: Session
) -> None:
    """As xargs, vLLM takes any value, and its handler of outputs ends in an error."""
    ours = {"choreo_session": session.id} if is_choreographed else {}
    body = {"model": server.model, "prompt": ANNA, "max_tokens": 2}
    with server.client() as client:
        answer = client.post("/v1/completions", json={**body, "vllm_xargs": {**ours, name: "none"}})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"vllm_xargs.{name}"
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "xargs",
    [
        b'{"choreo_new_offset": 1, "choreo_new_offset": 2}',
        b'{"choreo_parents": [], "choreo_mode": "exact", "choreo_parents": ["p"]}',
        b'{"other": 1}, "vllm_xargs": {"choreo_parents": []}',
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_key_that_stands_twice(
    route: str, xargs: bytes, server: Server, session: Session, call: Caller
) -> None:
    body = call.body(route, "Hm", {}, {})
    body |= body.pop("extra_body")
    body.pop("vllm_xargs")
    content = json.dumps(body)[:-1].encode() + b', "vllm_xargs": ' + xargs + b"}"
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    headers = {"Content-Type": "application/json"}
    with server.client() as client:
        answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "stands twice" in answer.json()["error"]["message"]


def test_several_prompts_are_refused(call: Caller) -> None:
    for prompt in (["a", "b"], [[5, 6], [7]]):
        with pytest.raises(openai.BadRequestError) as refused:
            call("completions", prompt)
        assert refused.value.param == "prompt"
    assert call("completions", ["a"])["usage"]["prompt_tokens"] == 1
    assert call("completions", [5, 6])["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("key", ["choreo_parents", "choreo"])
def test_routes_that_do_not_choreograph_say_so(key: str, server: Server) -> None:
    value = ["p"] if key == "choreo_parents" else "p"
    chat = [{"role": "user", "content": "Hm"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "Hm", "max_output_tokens": 4},
        "/v1/messages": {"messages": chat, "max_tokens": 4},
        "/v1/chat/completions/batch": {"messages": [chat], "max_tokens": 4},
    }
    with server.client() as client:
        for path, body in bodies.items():
            for stream in ({}, {"stream": True}) if "batch" not in path else ({},):
                ordinary = {"model": server.model, **body, **stream}
                answer = client.post(path, json={**ordinary, "vllm_xargs": {key: value}})
                assert answer.status_code == 400, (path, answer.text)
                assert f"vllm_xargs.{key}" in answer.json()["error"]["message"]
                assert client.post(path, json=ordinary).status_code == 200


def test_closing_a_session_ends_its_calls(server: Server, session: Session, call: Caller) -> None:
    client = AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key=server.keys[0], max_retries=0)
    options = {"max_tokens": 1500}

    async def read(started: asyncio.Event, **keys: Any) -> openai.APIError:
        body = call.body("completions", "Tell", keys, dict(options))
        with pytest.raises(openai.APIError) as ended:
            async for _ in await client.completions.create(**body, stream=True):
                started.set()
        return ended.value

    async def whole(**keys: Any) -> openai.APIError:
        body = call.body("chat", "Tell", keys, dict(options))
        with pytest.raises(openai.NotFoundError) as ended:
            await client.chat.completions.create(**body)
        return ended.value

    async def close() -> list[openai.APIError]:
        started = asyncio.Event()
        reads = asyncio.create_task(read(started, save_as="p"))
        await started.wait()
        named = [whole(save_as="q"), whole(parents=["p"], save_as="r")]
        others = [asyncio.create_task(call) for call in named]
        for name in ("q", "r"):
            while (await asyncio.to_thread(session.message, name)).status_code == 404:
                await asyncio.sleep(0.02)
        await client.delete(f"/choreo/sessions/{session.id}", cast_to=object)
        return await asyncio.gather(reads, *others)

    for error in asyncio.run(close()):
        assert error.type == "UnknownSessionError"
        assert error.param == "vllm_xargs.choreo_session"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [[], ["never"]], ids=["", "stop"])
def test_client_that_goes_away_leaves_nothing(
    stream: bool, stop: list[str], server: Server, session: Session, call: Caller
) -> None:
    session.call(type="prefill", content=ANNA, save_as="p")
    before = session.usage()
    body = call.body("completions", "Tell", {"parents": ["p"], "save_as": "gone"}, {})
    body.update(body.pop("extra_body"), max_tokens=1500, stop=stop)
    num_before = num_generated(session.client)
    if stream:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
        ):
            for _, line in zip(range(6), answer.iter_lines(), strict=False):
                assert "error" not in line
    else:
        leave(server, "/v1/completions", body, lambda: session.message("gone").status_code != 404)
    while session.usage() != before:
        time.sleep(0.1)
    assert num_generated(session.client) - num_before < 1500, "it has run on"
    assert call("completions", "Hm", save_as="gone")["usage"]["completion_tokens"] > 0


# -- ordinary requests ---------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_ordinary_requests_have_none_of_it(route: str, stream: bool, server: Server) -> None:
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hm"}]} if route == "chat" else {"prompt": "Hm"}
    )
    client = Caller(server, None).client
    create = (client.chat if route == "chat" else client).completions.create
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = create(
        model=server.model, max_tokens=3, **content, **options,
        extra_body={"vllm_xargs": {"other": "choreo_parents"}},
    )  # fmt: skip
    for part in answer if stream else [answer]:
        fields = part.model_dump()
        assert "choreo" not in fields
        assert not {"exact", "reused_tokens"} & (fields["usage"] or {}).keys()


def test_prefix_cache_knows_salts_and_no_choreography(
    server: Server, session: Session, call: Caller
) -> None:
    """Texts that no other test sends; 96 tokens are three blocks."""

    def num_cached(text: str, salt: str | None = None) -> int:
        salted = {"cache_salt": salt} if salt else {}
        usage = plain(server, text, 1, **salted)["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    text = "Seven salty sailors sold some sugar. " * 14
    assert num_cached(text, "salt") == 0
    assert num_cached(text, "salt") >= 96
    assert num_cached(text, "pepper") == 0
    assert num_cached(text) == 0
    assert num_cached(text) >= 96

    # A call does not read the prefix cache, and an ordinary request none of the call's blocks.
    assert call("completions", text, save_as="p")["usage"]["reused_tokens"] == 0
    other = "Eight eager eagles eat every egg. " * 14
    made = call("completions", other, save_as="q")
    assert made["usage"]["reused_tokens"] == 0
    assert call("chat", "Hm", parents=["q"])["usage"]["reused_tokens"] > 96
    assert num_cached(other) == 0


# -- the page for users --------------------------------------------------------------------------


@pytest.fixture
def examples(server: Server) -> Iterator[str]:
    """The examples of docs/openai.md, for this server; what they make is gone afterwards."""
    page = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    yield code.replace("http://localhost:8000", server.base_url).replace("secret", server.keys[1])
    made = Caller(server, None, server.keys[1])("completions", "Hm", parents=[])
    with server.client(server.keys[1]) as client:
        client.delete(f"/v1/choreo/sessions/{made['choreo']['session']}")


def test_page_runs(examples: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It asserts what it says; test_openai_answers.py reads what it prints."""
    exec(compile(examples, "docs/openai.md", "exec"), {})
    assert "session has no such message" in capsys.readouterr().out
