# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch --plugin choreo`: the lines of a file read one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.openai_calls import Caller
from tests.server.serving import QUICK
from vllm_choreo.integrations.in_process import words_of
from vllm_choreo.testing.server import MODEL_NAME, Server, environment

pytestmark = pytest.mark.exhaustive  # processes of their own

NUM_TOKENS = 6
QUESTIONS = {
    "facts": "Anna owns a red bicycle. Bob owns a blue car.",
    "more": "The shed behind the house is green.",
    "both": "What colour is the car?",
}
# What each line reads; "both" stands first in the file, and what it reads after it.
PARENTS = {"both": ["more[1:]", "facts"], "more": ["facts"], "facts": []}


def line(custom_id: str, content: str, stream: bool = False, **keys: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": stream},
        "return_token_ids": True,
    }
    if keys:
        body["vllm_xargs"] = {f"choreo_{name}": value for name, value in keys.items()}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def good_lines() -> list[dict[str, Any]]:
    return [
        line(name, QUESTIONS[name], save_as=name, parents=parents)
        for name, parents in PARENTS.items()
    ]


# custom_id -> keys; type, param and status of the error
REFUSED: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "unknown parent": ({"parents": ["nobody"]}, "UnknownMessageError", "parents", 400),
    "taken": ({"save_as": "facts"}, "NameTakenError", "save_as", 409),
    "circle 1": ({"save_as": "c1", "parents": ["c2"]}, "CyclicParentsError", "parents", 400),
    "circle 2": ({"save_as": "c2", "parents": ["c1[:2]"]}, "CyclicParentsError", "parents", 400),
    "behind a circle": ({"parents": ["c2"]}, "CyclicParentsError", "parents", 400),
    "itself": ({"save_as": "me", "parents": ["me"]}, "CyclicParentsError", "parents", 400),
    "denied": ({"parents": ["more"], "deny": ["facts"]}, "DeniedMessageError", "parents", 400),
    "refused": ({"save_as": "bad", "new_offset": -1}, "OffsetError", "new_offset", 400),
    "reads a refused one": ({"parents": ["bad"]}, "ParentFailedError", "parents", 400),
    "session": ({"session": "mine"}, "UnknownSessionError", "session", 404),
    "unknown key": ({"parent": ["facts"]}, "ChoreoError", "parent", 400),
    "no name": ({"save_as": ["facts"]}, "ChoreoError", "save_as", 400),
}


def run_batch(
    model_path: Path, folder: Path, lines: list[dict[str, Any]], **options: Any
) -> tuple[dict[str, dict[str, Any]], str]:
    """What the command makes of `lines`: the lines of its output by `custom_id`, and its log."""
    asked, answered = folder / "asked.jsonl", folder / "answered.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [str(Path(sys.executable).with_name("vllm")), "run-batch", "--model", str(model_path)]
    command += ["-i", str(asked), "-o", str(answered)]
    settings = {"served_model_name": MODEL_NAME, "dtype": "float32", "enforce_eager": True}
    settings |= {"max_model_len": 2048, "seed": 0, **QUICK, **options}
    command += words_of(settings)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = [json.loads(text) for text in answered.read_text().splitlines()]
    assert [one["custom_id"] for one in made] == [one["custom_id"] for one in lines]
    return {one["custom_id"]: one for one in made}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def batch(
    shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The answers to one file of everything."""
    lines = good_lines()
    lines += [line(name, "Hm", **keys) for name, (keys, *_) in REFUSED.items()]
    lines += [line("stream", "Hm", stream=True, parents=[]), line("ordinary", "Hm")]
    # Nobody can name them: what they make is freed at once.
    lines += [line(f"unnamed {i}", f"Number {i}", parents=["facts"]) for i in range(20)]
    folder = tmp_path_factory.mktemp("batch")
    answers, log = run_batch(shallow_model_path, folder, lines, plugin="choreo")
    assert "Traceback" not in log, log[-5000:]
    return answers


def test_lines_give_what_the_route_gives(batch: dict[str, dict[str, Any]], server: Server) -> None:
    """The same calls one after the other, on a server."""
    call = Caller(server, None)
    session = ""
    try:
        for name in reversed(PARENTS):
            options = {"max_tokens": NUM_TOKENS}
            expected = call(
                "chat", QUESTIONS[name], save_as=name, parents=PARENTS[name], options=options
            )
            session = expected["choreo"]["session"]
            answer = batch[name]["response"]["body"]
            assert batch[name]["error"] is None
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            usage = [each["usage"] for each in (answer, expected)]
            cached = [part.pop("prompt_tokens_details")["cached_tokens"] for part in usage]
            assert cached[0] == cached[1] and usage[0].items() <= usage[1].items()
            assert answer["choreo"]["id"].endswith(f"/{name}")
            assert answer["choreo"]["position"] == expected["choreo"]["position"]
    finally:
        with server.client() as client:
            client.delete(f"/v1/choreo/sessions/{session}")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_lines_say_why(batch: dict[str, dict[str, Any]], name: str) -> None:
    _, kind, param, status = REFUSED[name]
    answer = batch[name]
    error = answer["error"]["error"]
    expected = (kind, f"vllm_xargs.choreo_{param}", status)
    assert (error["type"], error["param"], error["code"]) == expected, error
    assert answer["response"]["status_code"] == status and error["message"]


def test_other_lines(batch: dict[str, dict[str, Any]]) -> None:
    assert batch["stream"]["error"]["error"]["param"] == "stream"
    ordinary = batch["ordinary"]["response"]["body"]
    assert ordinary["usage"]["completion_tokens"] == NUM_TOKENS and "choreo" not in ordinary
    facts = batch["facts"]["response"]["body"]["usage"]["total_tokens"]
    for i in range(20):
        usage = batch[f"unnamed {i}"]["response"]["body"]["usage"]
        assert usage["reused_tokens"] == facts and usage["exact"]
