# SPDX-License-Identifier: Apache-2.0
"""What `ChatChoreo` adds to `ChatOpenAI`, and LangChain's standard tests without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langchain_tests.unit_tests import ChatModelUnitTests
from openai import DefaultHttpxClient

from vllm_choreo.integrations.langchain import ChatChoreo
from vllm_choreo.testing.server import Server

RULE = SystemMessage("You answer in a few words.")
FACTS = [HumanMessage(text) for text in ("The shed is green.", "Anna owns a red bicycle.")]
QUESTION = HumanMessage("What colour is the shed?")
HEADER = 4  # tokens of "<|im_start|>assistant" and the end of the line


def expected(reason: str) -> Callable[..., None]:
    @pytest.mark.xfail(reason=reason, run=False)
    def not_run(self: Any) -> None: ...

    return not_run


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatChoreo

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm", "api_key": "alpha", "base_url": "http://localhost:1/v1"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        variables = {"OPENAI_API_KEY": "alpha", "OPENAI_API_BASE": "http://localhost:1/v1"}
        found = {"openai_api_key": "alpha", "openai_api_base": "http://localhost:1/v1"}
        return variables, {"model": "smollm"}, found

    test_serdes = expected("a session cannot be written down")


# -- what is added ---------------------------------------------------------------------------------


def options_of(server: Server) -> dict[str, Any]:
    """Of a model on the server, as deterministic as one call can be."""
    return {
        "base_url": f"{server.base_url}/v1",
        "api_key": server.keys[0],
        "model": server.model,
        "temperature": 0,
        "max_tokens": 8,
        "max_retries": 0,
    }


def chat(server: Server, **options: Any) -> ChatChoreo:
    """A model on the server."""
    return ChatChoreo(**{**options_of(server), **options})


@pytest.fixture
def llm(server: Server) -> Iterator[ChatChoreo]:
    model = chat(server)
    yield model
    model.end_session()


def told(message: Any) -> dict[str, Any]:
    """What an answer says of its message."""
    found: dict[str, Any] = message.response_metadata["choreo"]
    return found


def parents_of(server: Server, message: Any) -> list[str]:
    """The ids of what the call of an answer has read."""
    session, _, name = message.id.partition("/")
    with server.client() as client:
        stored = client.get(f"/v1/choreo/sessions/{session}/messages/{name}").json()
    assert stored["generated_text"] == message.content
    return [parent["id"] for parent in stored["parents"]]


def test_documents_in_another_order_are_not_encoded_again(llm: ChatChoreo, server: Server) -> None:
    first = llm.invoke([RULE, *FACTS, QUESTION])
    again = llm.invoke([RULE, *reversed(FACTS), QUESTION])
    a, b, c, d = parents_of(server, first)
    assert parents_of(server, again) == [a, c, b, d]
    usage = again.usage_metadata
    assert usage is not None
    assert told(again)["encoded_tokens"] == HEADER + usage["output_tokens"]
    assert told(again)["reused_tokens"] == usage["input_token_details"]["cache_read"]
    assert told(again)["reused_tokens"] == usage["input_tokens"] - HEADER
    assert not told(again)["exact"] and told(again)["id"] == again.id


@pytest.mark.parametrize("mode", ["choreo", "exact"])
def test_an_answer_in_a_history_is_read_as_it_was_generated(mode: str, server: Server) -> None:
    llm = chat(server, mode=mode)
    first = llm.invoke([RULE, QUESTION])
    again = llm.invoke([RULE, QUESTION, first, HumanMessage("Why?")])
    assert first.id in parents_of(server, again)
    llm.end_session()


def test_exact_answers_are_those_of_plain_text(server: Server) -> None:
    plain, exact = (chat(server, mode=mode, max_tokens=12) for mode in ("off", "exact"))
    histories: list[list[Any]] = [[RULE, *FACTS, QUESTION], [RULE, *FACTS, QUESTION]]
    for question in ("Who owns a bicycle?", "Say it again."):
        answers = [
            model.invoke(history) for model, history in zip((plain, exact), histories, strict=True)
        ]
        assert answers[0].content == answers[1].content
        assert told(answers[1])["exact"] and "choreo" not in answers[0].response_metadata
        for history, answer in zip(histories, answers, strict=True):
            history += [answer, HumanMessage(question)]
    exact.end_session()


def test_streams_add_up_to_the_answer(llm: ChatChoreo) -> None:
    whole = llm.invoke([RULE, QUESTION])
    chunks = list(llm.stream([RULE, QUESTION]))
    streamed: Any = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata == llm.invoke([RULE, QUESTION]).usage_metadata
    assert streamed.id == told(streamed)["id"] != whole.id
    assert told(streamed)["encoded_tokens"] == HEADER + streamed.usage_metadata["output_tokens"]
    again = llm.invoke([RULE, QUESTION, streamed, HumanMessage("Why?")])
    assert told(again)["reused_tokens"] > streamed.usage_metadata["total_tokens"]


def test_calls_at_once_share_what_they_read(llm: ChatChoreo, server: Server) -> None:
    """Whoever comes first encodes it."""
    rules = [SystemMessage(f"You are a {role}.") for role in ("lawyer", "cook", "poet")]
    counter = UsageMetadataCallbackHandler()
    answers = llm.batch([[rule, *FACTS, QUESTION] for rule in rules], {"callbacks": [counter]})
    read = [parents_of(server, answer) for answer in answers]
    assert len({tuple(parents[1:]) for parents in read}) == 1
    assert len({parents[0] for parents in read}) == 3
    (used,) = counter.usage_metadata.values()
    assert used["input_token_details"]["cache_read"] == sum(
        told(answer)["reused_tokens"] for answer in answers
    )


def test_a_lost_session_is_opened_again(llm: ChatChoreo, server: Server) -> None:
    first = llm.invoke([RULE, QUESTION])
    with server.client() as client:
        assert client.delete(f"/v1/choreo/sessions/{told(first)['session']}").status_code == 200
    again = llm.invoke([RULE, QUESTION])
    assert again.content == first.content and told(again)["session"] != told(first)["session"]
    with server.client() as client:
        freed = {"messages": [parents_of(server, again)[0].partition("/")[2]]}
        path = f"/v1/choreo/sessions/{told(again)['session']}/messages/free"
        assert client.post(path, json=freed).status_code == 200
    assert llm.invoke([RULE, QUESTION]).content == first.content


def test_instances_share_conversations(llm: ChatChoreo, server: Server) -> None:
    first = llm.invoke([RULE, QUESTION])
    other = chat(server, conversations=llm.conversations, max_tokens=2)
    assert parents_of(server, other.invoke([RULE, QUESTION])) == parents_of(server, first)


def test_clients_that_do_not_choreograph_are_refused(server: Server) -> None:
    with pytest.raises(ValueError, match="ChoreoHttpClient"):
        chat(server, http_client=DefaultHttpxClient())


def test_it_is_a_chat_model_of_openai() -> None:
    assert issubclass(ChatChoreo, ChatOpenAI)
