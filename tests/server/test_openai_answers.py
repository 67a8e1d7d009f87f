# SPDX-License-Identifier: Apache-2.0
"""vLLM's own routes on a model whose answers make sense: they call tools and fill in schemas."""

from __future__ import annotations

import json

import pytest

from tests.server.openai_calls import Caller, text_of
from tests.server.serving import Session
from tests.server.test_openai import ANNA, examples
from vllm_choreo.testing.server import Server

__all__ = ["examples"]  # the fixture

pytestmark = pytest.mark.exhaustive  # a server of its own


@pytest.fixture(scope="module")
def server(whole_server: Server) -> Server:
    return whole_server


@pytest.fixture
def call(server: Server, session: Session) -> Caller:
    """Calls in a session of their own."""
    return Caller(server, session.id)


def test_json_schema_with_parents(session: Session, call: Caller) -> None:
    call("completions", ANNA, save_as="p")
    schema = {
        "type": "object",
        "properties": {"owner": {"enum": ["Anna", "Bob"]}, "wheels": {"type": "integer"}},
        "required": ["owner", "wheels"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "ride", "schema": schema}}
    answer = call(
        "chat", "Who rides?", parents=["p"], save_as="json",
        options={"response_format": form, "max_tokens": 60, "ignore_eos": False},
    )  # fmt: skip
    found = json.loads(text_of(answer))
    assert found["owner"] in ("Anna", "Bob") and type(found["wheels"]) is int
    assert answer["usage"]["reused_tokens"] > 0
    assert session.message("json").json()["generated_text"] == text_of(answer)


def test_tool_call_with_parents(session: Session, call: Caller) -> None:
    call("completions", ANNA, save_as="p")
    parameters = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    tool = {
        "type": "function",
        "function": {"name": "paint", "strict": True, "parameters": parameters},
    }
    answer = call(
        "chat", "Paint it like the car.", parents=["p"], save_as="tool",
        options={"tools": [tool], "tool_choice": "required", "max_tokens": 60, "ignore_eos": False},
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "paint"
    assert json.loads(made["function"]["arguments"])["colour"] in ("red", "blue")
    assert session.message("tool").json()["generated_token_ids"] == choice["token_ids"]


def test_the_page_prints_what_makes_sense(
    examples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(examples, "docs/openai.md", "exec"), {})
    assert "green" in capsys.readouterr().out
