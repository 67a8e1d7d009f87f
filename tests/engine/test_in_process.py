# SPDX-License-Identifier: Apache-2.0
"""A server that is an object of the program: LangChain's model and OpenAI's SDK over it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from openai import OpenAI

from tests.quick import NUM_BLOCKS, ONE_PROCESS
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.integrations.in_process import InProcessServer
from vllm_choreo.integrations.langchain import ChatChoreo
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.testing.server import environment

pytestmark = pytest.mark.exhaustive  # servers of its own

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
RULE = SystemMessage("You answer in a few words.")
FACTS = [HumanMessage(text) for text in ("The shed is green.", "Anna owns a red bicycle.")]
QUESTION = HumanMessage("What colour is the shed?")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "distributed_executor_backend": ONE_PROCESS,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "served_model_name": "small",
}


@pytest.fixture(scope="module")
def server(embedded_model_path: Path) -> Iterator[InProcessServer]:
    """Leaves the variables of this process as they were; other engines read them."""
    before = dict(os.environ)
    try:
        with InProcessServer(embedded_model_path, **OPTIONS) as running:
            yield running
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def llm(server: InProcessServer) -> Iterator[ChatChoreo]:
    model = ChatChoreo(server=server, temperature=0, max_tokens=8)
    yield model
    model.end_session()


def test_documents_in_another_order_are_not_encoded_again(llm: ChatChoreo) -> None:
    llm.invoke([RULE, *FACTS, QUESTION])
    again = llm.invoke([RULE, *reversed(FACTS), QUESTION])
    told, usage = again.response_metadata["choreo"], again.usage_metadata
    assert usage is not None and usage["input_token_details"]["cache_read"] > 20
    assert told["reused_tokens"] + told["encoded_tokens"] == usage["total_tokens"]


def test_exact_answers_are_those_of_plain_text(server: InProcessServer) -> None:
    said = []
    for mode in ("off", "exact"):
        llm = ChatChoreo(server=server, mode=mode, temperature=0, max_tokens=12)
        said.append([llm.invoke([RULE, *FACTS, QUESTION]).content for _ in range(2)])
        llm.end_session()
    assert said[0] == said[1]


def test_pieces_of_a_prompt_outlive_the_submission_of_its_last_call(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument is encoded long before the call that reads it comes to the engine."""
    submit = CallClient._submit

    async def late(self: CallClient, *args: Any) -> None:
        await asyncio.sleep(2)
        await submit(self, *args)

    monkeypatch.setattr(CallClient, "_submit", late)
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with server.http_client() as http:
        schema = '<schema name="hut"><module name="owner">Owner: <param name="name" len="4"/>'
        body = {"markup": f"{schema}.</module></schema>"}
        url = server.base_url.removesuffix("/v1")
        made = http.post(f"{url}/v1/choreo/schemas", json=body, headers=headers)
        assert made.status_code == 200, made.text
        prompt = '<owner name="Anna"/><user>Who owns it?</user>'
        asked = {
            "model": "small",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "vllm_xargs": {"choreo_schema": "hut"},
        }
        answer = http.post(f"{server.base_url}/chat/completions", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["argument_tokens"] == 1


def test_streams_tools_and_callers_at_once(llm: ChatChoreo) -> None:
    whole = llm.invoke([RULE, QUESTION])
    chunks = list(llm.stream([RULE, QUESTION]))
    assert len(chunks) > 2 and "".join(str(chunk.content) for chunk in chunks) == whole.content
    place = {"type": "string", "enum": ["shed"]}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    tool = {"name": "look", "description": "Look.", "parameters": parameters}
    call = llm.bind_tools([tool], tool_choice="look", max_tokens=64).invoke([RULE, QUESTION])
    assert call.tool_calls[0]["args"] == {"place": "shed"}

    async def several() -> list[Any]:
        return await asyncio.gather(*(llm.ainvoke([RULE, QUESTION]) for _ in range(3)))

    assert [answer.content for answer in asyncio.run(several())] == [whole.content] * 3


def test_the_sdk_of_openai(server: InProcessServer) -> None:
    http = server.http_client()
    client = OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http)
    chat = [{"role": "user", "content": "What colour is grass?"}]
    asked: dict[str, Any] = {"model": server.model, "messages": chat, "max_tokens": 4}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    assert again.usage.reused_tokens == first.usage.reused_tokens > 0
    http.end_session()


@pytest.mark.parametrize("options", [{"port": 80}, {"api_key": "x"}], ids=["port", "key"])
def test_a_server_in_a_program_has_no_address(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match="vllm serve"):
        InProcessServer("MODEL", **options)


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    """In a process of its own: options that are wrong end a program that parses them."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "from vllm_choreo.integrations.in_process import InProcessServer\n"
        "if __name__ == '__main__':\n"
        f"    InProcessServer({str(tmp_path / 'none')!r})\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 1 and str(tmp_path / "none") in ended.stderr


def test_the_page_runs(shallow_model_path: Path, tmp_path: Path) -> None:
    """As a program: its engine starts, answers, and nothing of it stays."""
    (example,) = re.findall(
        r"```python\n((?:(?!```).)*InProcessServer.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    script = tmp_path / "agent.py"
    assert '"MODEL"' in example
    script.write_text(example.replace('"MODEL"', repr(str(shallow_model_path))))
    variables = environment({"TMPDIR": str(tmp_path)})
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=variables
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "reused_tokens" in ended.stdout
    assert not list(tmp_path.glob("choreo-*"))
