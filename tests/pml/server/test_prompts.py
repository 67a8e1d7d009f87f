# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts over HTTP: tenants, the operator, streams, limits, and every client."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import QUICK
from vllm_choreo import AsyncChoreoClient, ChoreoClient
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import LimitError, NameTakenError, PmlError, UnknownSchemaError
from vllm_choreo.pml import (
    AsyncServerPrompts,
    ServerPrompts,
    parse_prompt,
    parse_schema,
    to_markup,
)
from vllm_choreo.testing.server import KEYS, Server, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own; tests/server has prompts in every run

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = " ".join(f"Shelf {n} of the cellar holds {n * 7} jars of plums." for n in range(1, 12))
SCHEMA = f"""<schema name="cellar">
  <system>You keep a cellar.</system>
  <user>
    <module name="shelves">{TEXT}</module>
    <module name="owner">The cellar is <param name="name" len="8"/>'s.</module>
  </user>
  <assistant>I have read it.</assistant>
</schema>"""
PROMPT = (
    '<prompt schema="cellar"><shelves/><owner name="Anna"/><user>How many jars?</user></prompt>'
)
PLAIN = '<prompt schema="cellar"><shelves/><user>How many jars?</user></prompt>'
STAIRS = " ".join(f"Step {n} of the stairs is {n * 3} inches wide." for n in range(1, 9))
OPERATORS = (
    SCHEMA.replace('name="cellar"', 'name="house"')
    .replace("plums", "pears")
    .replace("  </user>", f'    <module name="stairs">{STAIRS}</module>\n  </user>')
)


@pytest.fixture(scope="module")
def server(shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "house.pml").write_text(OPERATORS)
    settings = {"server": {"max_schemas_per_tenant": 2, "max_tokens_per_schema": 500}}
    options = {"choreo_schema": str(folder / "house.pml"), "settings": settings, **QUICK}
    with start_server(shallow_model_path, folder, **options) as running:
        yield running


@pytest.fixture
def c(server: Server) -> Iterator[ChoreoClient]:
    """A client of the first tenant, whose schemas are deleted at the end."""
    with ChoreoClient(server.base_url, KEYS[0]) as client:
        yield client
        for schema in ServerPrompts(client).schemas():
            if schema["owner"] == "tenant":
                ServerPrompts(client).unregister(schema["id"])


def posted(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/choreo/{path}", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def refused(client: httpx.Client, path: str, status: int, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/choreo/{path}", json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# -- schemas -------------------------------------------------------------------------------------


def test_a_schema_is_registered_listed_shown_and_deleted(
    c: ChoreoClient, alpha: httpx.Client
) -> None:
    made = posted(alpha, "schemas", markup=SCHEMA)
    assert made["id"] == "cellar" and made["owner"] == "tenant" and made["num_modules"] == 2
    assert posted(alpha, "schemas", markup=SCHEMA)["created"] == made["created"]
    listed = alpha.get("/v1/choreo/schemas").json()["data"]
    assert [(s["id"], s["owner"]) for s in listed] == [("house", "operator"), ("cellar", "tenant")]
    shown = alpha.get("/v1/choreo/schemas/cellar").json()
    assert parse_schema(shown["markup"]) == parse_schema(SCHEMA)
    owner = shown["modules"][1]
    assert owner["params"] == [{"name": "name", "length": 8}] and owner["path"] == "owner"
    assert "module shelves" in shown["outline"]
    assert alpha.delete("/v1/choreo/schemas/cellar").json()["deleted"]
    for method in ("GET", "DELETE"):
        assert alpha.request(method, "/v1/choreo/schemas/cellar").status_code == 404
    assert alpha.delete("/v1/choreo/schemas/house").status_code == 404


def test_what_is_refused(c: ChoreoClient, alpha: httpx.Client) -> None:
    error = refused(alpha, "schemas", 400, markup='<schema name="s">\n<b/></schema>')
    assert error["type"] == "PmlError" and error["message"].startswith("line 2, column 1: unknown")
    bomb = '<!DOCTYPE s [<!ENTITY a "b">]><schema name="s">&a;</schema>'
    assert "document types" in refused(alpha, "schemas", 400, markup=bomb)["message"]
    taken = SCHEMA.replace('name="cellar"', 'name="house"')
    assert refused(alpha, "schemas", 409, markup=taken)["type"] == "NameTakenError"
    long = f'<schema name="s">{"word " * 600}</schema>'
    for markup in (long, long.replace("word ", "word " * 100)):
        assert refused(alpha, "schemas", 429, markup=markup)["param"] == "max_tokens_per_schema"
    for name in ("one", "two"):
        posted(alpha, "schemas", markup=f'<schema name="{name}">x</schema>')
    error = refused(alpha, "schemas", 429, markup='<schema name="three">x</schema>')
    assert error["param"] == "max_schemas_per_tenant"
    for prompt, text in (
        ("<prompt", "unclosed token"),
        ('<prompt schema="none">x</prompt>', "register it first"),
        ('<prompt schema="one"><a/>x</prompt>', "line 1, column 22: the schema has no such module"),
        ('<prompt schema="one"/>', "ends with new text"),
        ('<prompt schema="one"><message name="m"/>x</prompt>', "session has no such message"),
    ):
        assert text in refused(alpha, "prompts", 400, prompt=prompt)["message"]
    assert refused(alpha, "prompts", 404, prompt="x", session="none")["param"] == "session"
    assert refused(alpha, "prompts", 400, prompt="x", more=1)["param"] == "more"


# -- prompts -------------------------------------------------------------------------------------


def test_a_prompt_says_where_its_tokens_came_from(c: ChoreoClient, alpha: httpx.Client) -> None:
    schema = posted(alpha, "schemas", markup=SCHEMA, encode=True)
    assert "encoded" in schema["outline"]
    first = posted(alpha, "prompts", prompt=PROMPT, sampling_params=GREEDY)
    usage = first["usage"]
    assert usage["argument_tokens"] == 1 and usage["new_tokens"] > 5
    assert usage["module_tokens"] == schema["num_tokens"] - 8
    assert usage["reused_tokens"] == usage["module_tokens"] + usage["argument_tokens"]
    assert usage["encoded_tokens"] == usage["new_tokens"] + 8
    again = posted(alpha, "prompts", prompt=PROMPT, sampling_params=GREEDY)
    assert again["generated_token_ids"] == first["generated_token_ids"]
    with alpha.stream(
        "POST",
        "/v1/choreo/prompts",
        json={"prompt": PROMPT, "sampling_params": GREEDY, "stream": True},
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {event["index"] for event in events} == {0} and len(events) > 3
    assert events[-1]["usage"]["module_tokens"] == usage["module_tokens"]
    assert "".join(e["text"] for e in events[:-1]) == first["generated_text"]


def test_the_openai_routes_take_prompts(c: ChoreoClient, alpha: httpx.Client) -> None:
    ServerPrompts(c).register(SCHEMA)
    expected = ServerPrompts(c).decode(PROMPT, sampling_params=GREEDY)
    inner = '<shelves/><owner name="Anna"/><user>How many jars?</user>'
    common = {"model": "smollm", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    xargs = {"choreo_schema": "cellar", "choreo_session": c.session}
    bodies = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": [{"role": "user", "content": inner}]},
    }
    for route, body in bodies.items():
        answer = alpha.post(f"/v1/{route}", json={**common, **body, "vllm_xargs": xargs})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == expected.text
        usage = answer.json()["usage"]
        assert usage["module_tokens"] == expected.usage.module_tokens
        assert usage["argument_tokens"] == 1
        body = {**common, **body, "vllm_xargs": xargs, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with alpha.stream("POST", f"/v1/{route}", json=body) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert chunks[-1]["usage"]["module_tokens"] == expected.usage.module_tokens
    base = {"choreo_session": c.session}
    for wrong, param in (
        ({"choreo_schema": "none"}, "choreo_schema"),
        ({"choreo_schema": "cellar", "choreo_parents": ["x"]}, "choreo_parents"),
        ({"choreo_layout": "compact"}, "choreo_layout"),
        ({"choreo_schema": "cellar", "choreo_layout": "x"}, "choreo_layout"),
    ):
        body = {**common, "prompt": inner, "vllm_xargs": {**base, **wrong}}
        answer = alpha.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"].endswith(param)
    body = {**common, "messages": [{"role": "system", "content": inner}], "vllm_xargs": xargs}
    assert alpha.post("/v1/chat/completions", json=body).status_code == 400


def test_answers_have_the_form_that_was_asked_for(c: ChoreoClient, alpha: httpx.Client) -> None:
    """Structured output on our route and on OpenAI's: the same tokens."""
    ServerPrompts(c).register(SCHEMA)
    options = {
        "temperature": 0,
        "max_tokens": 40,
        "structured_outputs": {"regex": r'\{"jars": [1-9][0-9]\}'},
    }
    ours = ServerPrompts(c).decode(PLAIN, sampling_params=options)
    assert 10 <= json.loads(ours.text)["jars"] <= 99
    answer = alpha.post(
        "/v1/chat/completions",
        json={
            **options,
            "model": "smollm",
            "messages": [{"role": "user", "content": "<shelves/><user>How many jars?</user>"}],
            "vllm_xargs": {"choreo_schema": "cellar", "choreo_session": c.session},
        },
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ours.text


def test_the_clients_do_it_all(server: Server, c: ChoreoClient) -> None:
    tree = parse_schema(SCHEMA)
    assert ServerPrompts(c).register(tree, encode=True)["num_modules"] == 2
    answer = ServerPrompts(c).decode(parse_prompt(PROMPT), sampling_params=GREEDY, save_as="kept")
    assert answer.message.id.endswith("/kept") and answer.usage.argument_tokens == 1
    follow = '<prompt schema="cellar"><shelves/><message name="kept"/> So</prompt>'
    again = ServerPrompts(c).decode(follow, sampling_params=GREEDY)
    assert again.usage.message_tokens == answer.message.num_tokens
    exact = ServerPrompts(c).decode(PLAIN, mode="exact", sampling_params=GREEDY)
    assert exact.message.usage.exact
    assert "encoded" in ServerPrompts(c).show("cellar")
    with pytest.raises(NameTakenError):
        ServerPrompts(c).register(SCHEMA.replace("plums", "figs"))
    with pytest.raises(PmlError, match="line 1, column 26"):
        ServerPrompts(c).decode('<prompt schema="cellar"> <b/>x</prompt>')
    with pytest.raises(PmlError, match="no such option"):
        ServerPrompts(c).decode(PLAIN, parents=[])
    with pytest.raises(LimitError):
        ServerPrompts(c).register(f'<schema name="s">{"word " * 600}</schema>')

    async def run() -> None:
        async with AsyncChoreoClient(server.base_url, KEYS[0]) as client:
            prompts = AsyncServerPrompts(client)
            assert [s["id"] for s in await prompts.schemas()] == ["house", "cellar"]
            both = await asyncio.gather(
                *(prompts.decode(p, sampling_params=GREEDY) for p in (PROMPT, PLAIN))
            )
            assert both[0].text == answer.text
            pieces = [p async for p in prompts.stream_decode(PROMPT, sampling_params=GREEDY)]
            assert pieces[-1].message is not None and len(pieces) > 2
            assert "".join(piece.text for piece in pieces) == answer.text
            long = {"max_tokens": 500, "ignore_eos": True}
            async with aclosing(prompts.stream_decode(PROMPT, sampling_params=long)) as stream:
                async for _ in stream:
                    break
            assert "module shelves" in await prompts.show("house")
            await prompts.unregister("cellar")
            with pytest.raises(UnknownSchemaError):
                await prompts.schema("cellar")
            await prompts.register(SCHEMA)

    asyncio.run(run())


def test_clients_prefetch_unions_of_their_own_session(server: Server, c: ChoreoClient) -> None:
    ends = '<union><module name="a">One.</module><module name="b">Two.</module></union>'
    ServerPrompts(c).register(SCHEMA.replace("</user>", f"{ends}</user>"))
    assert ServerPrompts(c).prefetch("cellar", "a") == 2
    taken = ServerPrompts(c).decode(
        '<prompt schema="cellar"><b/><user>So?</user></prompt>', sampling_params=GREEDY
    )
    assert taken.usage.module_tokens > 0

    async def run() -> tuple[int, int]:
        async with AsyncChoreoClient(server.base_url, KEYS[0]) as client:
            prompts = AsyncServerPrompts(client)
            return await prompts.prefetch("cellar", "b"), await prompts.prefetch("cellar", "a")

    assert asyncio.run(run()) == (2, 0), "messages are a session's"
    with pytest.raises(PmlError, match="in no union"):
        ServerPrompts(c).prefetch("cellar", "shelves")
    with pytest.raises(UnknownSchemaError):
        ServerPrompts(c).prefetch("nothing", "a")


def test_what_a_tenant_frees_is_encoded_again(c: ChoreoClient) -> None:
    ServerPrompts(c).register(SCHEMA)
    first = ServerPrompts(c).decode(PLAIN, sampling_params=GREEDY)
    c.free(*(span.id for span in first.message.parents))
    assert ServerPrompts(c).decode(PLAIN, sampling_params=GREEDY).text == first.text


# -- tenants -------------------------------------------------------------------------------------


def encoded_by(server: Server, key: str, schema: str) -> int:
    """Tokens of modules that a tenant's first prompt in a new session has computed."""
    with ChoreoClient(server.base_url, key) as client:
        prompt = PLAIN.replace("cellar", schema)
        answer = ServerPrompts(client).decode(prompt, sampling_params=GREEDY)
        modules = [client.message(span.id) for span in answer.message.parents]
        return sum(module.usage.encoded_tokens for module in modules)


@pytest.mark.parametrize("how", [{"mode": "exact"}, {"repair": "all", "layout": "compact"}])
def test_what_a_tenant_takes_of_the_operators_tells_no_other(
    server: Server, how: dict[str, Any]
) -> None:
    """A module is the operator's; in which contexts it is read is the readers'."""
    parts = {"exact": "<shelves/><stairs/>", "all": "<owner name='B'/><stairs/>"}
    markup = parts[next(iter(how.values()))]
    prompt = f'<prompt schema="house">{markup}<user>{secrets.token_hex(4)}</user></prompt>'
    clients = [server.client(key) for key in KEYS]
    sessions = [posted(client, "sessions")["id"] for client in clients]
    encoded = [
        posted(client, "prompts", prompt=prompt, session=session, sampling_params=GREEDY, **how)[
            "usage"
        ]["encoded_tokens"]
        for client, session in zip(clients, sessions, strict=True)
    ]
    for client, session in zip(clients, sessions, strict=True):
        client.delete(f"/v1/choreo/sessions/{session}")
        client.close()
    assert encoded[0] == encoded[1] > 60, "as if nobody had asked before"


def test_tenants_share_nothing_but_the_operators(server: Server, c: ChoreoClient) -> None:
    """The same text: what the second session of a tenant takes, and the first of another one."""
    with ChoreoClient(server.base_url, KEYS[1]) as other:
        with pytest.raises(UnknownSchemaError):
            ServerPrompts(other).decode(PLAIN)
        ServerPrompts(c).register(SCHEMA)
        ServerPrompts(other).register(SCHEMA)
        with ChoreoClient(server.base_url, KEYS[0]) as keeper:
            ServerPrompts(keeper).decode(PLAIN, sampling_params=GREEDY)
            own = encoded_by(server, KEYS[0], "cellar")
            others = encoded_by(server, KEYS[1], "cellar")
        operators = [encoded_by(server, key, "house") for key in KEYS]
        ServerPrompts(other).unregister("cellar")
    # Of what is encoded already, each message runs what is left of its last block.
    assert min(others - own, *(others - count for count in operators)) > 100, (own, others)


def test_the_command_runs_prompts_on_a_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.pml"
    path.write_text(f"<pml>{SCHEMA}{to_markup(parse_prompt(PROMPT))}</pml>")
    arguments = ["pml", "run", str(path), "--server", server.base_url, "--api-key", KEYS[0]]
    assert cli.main([*arguments, "--max-tokens", "4"]) == 0
    assert "1 of arguments" in capsys.readouterr().out
    with ChoreoClient(server.base_url, KEYS[0]) as client:
        assert [schema["id"] for schema in ServerPrompts(client).schemas()] == ["house"]


def test_clients_still_have_their_prompts(server: Server) -> None:
    async def listed() -> Any:
        async with AsyncChoreoClient(server.base_url, KEYS[0]) as client:
            with pytest.warns(DeprecationWarning, match="AsyncServerPrompts"):
                return await client.prompts.schemas()

    with (
        ChoreoClient(server.base_url, KEYS[0]) as client,
        pytest.warns(DeprecationWarning, match="ServerPrompts"),
    ):
        assert client.prompts.schemas() == asyncio.run(listed())


def test_a_file_that_is_no_schema_ends_the_start(shallow_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.pml").write_text('<schema name="s">\n <b/></schema>')
    with (
        pytest.raises(RuntimeError),
        start_server(shallow_model_path, tmp_path, choreo_schema=str(tmp_path / "bad.pml")),
    ):
        pass
    (log,) = tmp_path.glob("server-*.log")
    assert "line 2, column 2: unknown element" in log.read_text()


def test_nothing_is_left(server: Server) -> None:
    for key in KEYS:
        with server.client(key) as client:
            listed = client.get("/v1/choreo/schemas").json()["data"]
            assert [schema["owner"] for schema in listed] == ["operator"]
