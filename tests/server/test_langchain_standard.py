# SPDX-License-Identifier: Apache-2.0
"""`ChatChoreo` on a server against LangChain's standard tests, and with calls of tools.

The standard tests know nothing of choreography. What they skip for what a model cannot do is marked
here as expected, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import ToolMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.server.test_langchain import (
    QUESTION,
    RULE,
    chat,
    expected,
    llm,
    options_of,
    parents_of,
)
from vllm_choreo.integrations.langchain import ChatChoreo
from vllm_choreo.testing.server import Server

__all__ = ["llm"]  # the fixture


@pytest.fixture
def server(whole_server: Server) -> Server:
    """Of a model that can answer."""
    return whole_server


@pytest.mark.exhaustive
@pytest.mark.anyio
class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture(autouse=True)
    def _of(self, server: Server, request: pytest.FixtureRequest) -> None:
        self.server = server
        # Most want an answer, and some an answer that ends: so strings end soon.
        self.options: dict[str, Any] = {"max_tokens": 4}
        if re.search(r"structured|json", request.node.name):
            self.options = {"max_tokens": 96, "logit_bias": QUOTES}
        elif re.search(r"tool_calling|as_tools|tool_choice", request.node.name):
            self.options = {"max_tokens": 64}

    @pytest.fixture
    def model(self, _of: None, request: Any) -> Iterator[BaseChatModel]:
        options = {**self.chat_model_params, **(getattr(request, "param", None) or {})}
        with_server = chat(self.server, **options)
        yield with_server
        with_server.end_session()

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatChoreo

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # The properties of a class are read before any test.
        server = getattr(self, "server", None)
        return {} if server is None else options_of(server) | self.options

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm"


QUOTES = {18: 8, 476: 8, 1002: 8}  # tokens of the embedded model that end a string
UNABLE = {
    "test_json_mode": "the model writes JSON without end where no schema ends it",
    "test_unicode_tool_call_integration": "the model does not end a string that is not English",
    "test_tool_calling_with_no_arguments": "the model fills empty arguments with white space",
    "test_agent_loop": "the model answers with text where it should call a tool",
    "test_stream_time": "there are no recorded answers",
    **dict.fromkeys(
        (
            "test_audio_inputs", "test_image_inputs", "test_image_tool_message",
            "test_pdf_inputs", "test_pdf_tool_message", "test_anthropic_inputs",
        ),
        "the model reads text alone",
    ),
}  # fmt: skip
for _name, _reason in UNABLE.items():
    setattr(TestIntegration, _name, expected(_reason))


@pytest.mark.exhaustive
def test_calls_of_tools_are_known_by_their_ids(llm: ChatChoreo, server: Server) -> None:
    """The template writes them in other words than the model did."""
    place = {"type": "string", "enum": ["shed"]}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    tool = {"name": "look", "description": "Look.", "parameters": parameters}
    call = llm.bind_tools([tool], tool_choice="look", max_tokens=64).invoke([RULE, QUESTION])
    (made,) = call.tool_calls
    assert made["args"] == {"place": "shed"}
    result = ToolMessage("green", tool_call_id=made["id"])
    answer = llm.bind_tools([tool]).invoke([RULE, QUESTION, call, result])
    assert call.id in parents_of(server, answer)
