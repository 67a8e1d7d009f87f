# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own SDK on our HTTP clients, and the header that they send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.openai_calls import Caller, plain, tokens_of
from tests.server.serving import Session
from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.integrations.openai_http import ChoreoAsyncHttpClient, ChoreoHttpClient
from vllm_choreo.testing.server import Server

CHAT = [
    {"role": "system", "content": "You answer in a few words."},
    {"role": "user", "content": "The shed is green. What colour is the shed?"},
]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    http = ChoreoHttpClient()
    yield OpenAI(
        base_url=f"{server.base_url}/v1", api_key=server.keys[0], http_client=http, max_retries=0
    )
    http.end_session()


def ask(client: Any, server: Server, messages: Any = CHAT, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 6, **options}
    return client.chat.completions.create(model=server.model, messages=messages, **options)


def test_streams_and_answers_are_reused(client: OpenAI, server: Server) -> None:
    whole = ask(client, server)
    chunks = list(ask(client, server, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.reused_tokens == whole.usage.reused_tokens > 0
    more = [*CHAT, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    assert ask(client, server, more).usage.reused_tokens > whole.usage.total_tokens


def test_the_async_client_is_its_twin(server: Server) -> None:
    async def both() -> list[Any]:
        http = ChoreoAsyncHttpClient()
        base_url = f"{server.base_url}/v1"
        client = AsyncOpenAI(base_url=base_url, api_key=server.keys[0], http_client=http)
        answers = await asyncio.gather(*[ask(client, server) for _ in range(3)])
        stream = await ask(client, server, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        await http.end_session()
        return [*(answer.choices[0].message.content for answer in answers), "".join(text)]

    assert len(set(asyncio.run(both()))) == 1


def test_what_the_server_refuses_is_the_errors_of_the_sdk(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(client, server, extra_body={"model": "nobody"})
    with pytest.raises(openai.BadRequestError, match=r"longer|maximum|context"):
        ask(client, server, [{"role": "user", "content": "word " * 3000}])
    with pytest.raises(openai.BadRequestError, match="send it n times"):
        ask(client, server, n=2)
    assert ask(client, server).choices[0].message.content


def test_requests_without_choreography_pass(client: OpenAI, server: Server) -> None:
    client._client.conversations = Conversations("off")  # type: ignore[attr-defined]
    answer = ask(client, server)
    assert "choreo" not in answer.model_dump()
    assert client._client.conversations.encoded_tokens > 0  # type: ignore[attr-defined]
    assert client.models.list().data


# -- choreo_prefix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_parents_stand_for_the_beginning_of_a_text(
    route: str, server: Server, session: Session
) -> None:
    """The header is what follows the prefix; the engine reads parents and header."""
    call = Caller(server, session.id)
    made = call("completions", "Anna owns a red bicycle.", save_as="p")
    parent = [token for tokens in tokens_of(made) for token in tokens]
    whole = tokens_of(call(route, "What is it? Say it."))[0]
    answer = call(route, "What is it? Say it.", parents=["p"], prefix=whole[:3])
    rest = tokens_of(plain(server, [*parent, *whole[3:]]))[1]
    assert tokens_of(answer) == (whole[3:], rest)


@pytest.mark.parametrize("prefix", ["text", [1.5], ["1"], [10**9], [0]])
def test_other_prefixes_are_refused(prefix: Any, server: Server, session: Session) -> None:
    call = Caller(server, session.id)
    with pytest.raises(openai.BadRequestError) as caught:
        call("chat", "Hm", prefix=prefix)
    assert caught.value.param == "vllm_xargs.choreo_prefix"
    assert caught.value.type == "PrefixError"


def test_a_whole_text_leaves_no_header(server: Server, session: Session) -> None:
    call = Caller(server, session.id)
    whole = tokens_of(call("chat", "Hm"))[0]
    with pytest.raises(openai.BadRequestError) as caught:
        call("chat", "Hm", prefix=whole)
    assert caught.value.type == "EmptyTokensError"
