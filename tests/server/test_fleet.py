# SPDX-License-Identifier: Apache-2.0
"""A server of two engines, of which one is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from vllm_choreo import ChoreoClient
from vllm_choreo.server.answers import FleetAnswer
from vllm_choreo.testing.server import Server, start_server

pytestmark = pytest.mark.exhaustive  # a server's start

_GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fleet")
    options = {
        **{"data_parallel_size": 2, "max_model_len": 1024, "num_gpu_blocks_override": 256},
        "choreo_keep": str(folder / "kept"),
        "settings": {"server": {"page": True}},
    }
    with start_server(tiny_model_path("llama"), folder, **options) as started:
        yield started


def _engines(server: Server) -> list[psutil.Process]:
    below = psutil.Process(server.process.pid).children()
    return [process for process in below if "EngineCore" in " ".join(process.cmdline())]


def _wait_until_all_run(server: Server) -> None:
    while "starting" in server.client().get("/v1/choreo/fleet").text:
        time.sleep(0.5)


@pytest.mark.timeout(1500)
def test_a_session_outlives_an_engine(server: Server) -> None:
    words = [" ".join(f"t{(7 * i + j) % 400 + 20}" for i in range(40)) for j in range(4)]
    with ChoreoClient(server.base_url, api_key=server.keys[0], timeout=600) as c:
        facts = c.prefill([{"tokens": text} for text in words])
        first = c.decode("t5 t6", parents=facts, sampling_params=_GREEDY)
        engines = _engines(server)
        assert len(engines) == 2
        for engine in engines:  # one after the other: the session outlives both
            os.kill(engine.pid, signal.SIGKILL)
            again = c.decode("t5 t6", parents=facts, sampling_params=_GREEDY)
            assert again.generated_token_ids == first.generated_token_ids
            _wait_until_all_run(server)
        later = c.decode("t7", parents=[first, facts[0]], sampling_params=_GREEDY)
        assert len(later.generated_token_ids) == 8
    answer = server.client().post(
        "/v1/completions", json={"model": server.model, "prompt": "t5 t6", "max_tokens": 3}
    )
    assert answer.status_code == 200
    assert "vllm_choreo:num_messages" in server.client(None).get("/metrics").text


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
def test_the_engines_are_seen_from_outside(server: Server) -> None:
    _wait_until_all_run(server)
    with ChoreoClient(server.base_url, api_key=server.keys[0], timeout=600) as c:
        facts = c.prefill(
            [{"tokens": " ".join(f"t{20 + i + j}" for i in range(40))} for j in (0, 1)]
        )
        c.decode("t5 t6", parents=facts, sampling_params=_GREEDY)
        page = Path(__file__).parents[2] / "docs" / "fleet.md"
        (command,) = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        told = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            env={**os.environ, "BASE": server.base_url, "KEY": server.keys[0]},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert told.count('"state": "running"') == 2
        found = server.client().get("/v1/choreo/fleet").json()
        TypeAdapter(FleetAnswer).validate_python(found)
        assert [engine["engine"] for engine in found["data"]] == [0, 1]
        assert sum(engine["tokens"] for engine in found["data"]) >= 80
        assert server.client(None).get("/v1/choreo/fleet").status_code == 401
        shown = server.client().get(f"/v1/choreo/sessions/{c.session}/page").text
        assert re.search(r", engine [01]", shown)
    metrics = server.client(None).get("/metrics").text
    for engine in (0, 1):
        assert re.search(rf'vllm_choreo:num_messages\{{engine="{engine}"', metrics)


@pytest.mark.timeout(1500)
def test_messages_are_saved_and_loaded(server: Server) -> None:
    with ChoreoClient(server.base_url, api_key=server.keys[0], timeout=600) as c:
        facts = c.prefill([{"tokens": f"t3{n} t4{n} t5{n}"} for n in range(4)])
        expected = c.decode("t5 t6", parents=facts, sampling_params=_GREEDY)
        c.save(facts, "facts", encodings=True)
    with ChoreoClient(server.base_url, api_key=server.keys[0], timeout=600) as c:
        loaded = c.load("facts")
        again = c.decode("t5 t6", parents=loaded, sampling_params=_GREEDY)
        assert again.generated_token_ids == expected.generated_token_ids


@pytest.mark.timeout(1500)
def test_openai_calls_find_their_messages(server: Server) -> None:
    with ChoreoClient(server.base_url, api_key=server.keys[0], timeout=600) as c:
        facts = c.prefill([{"tokens": "t30 t31 t32"}, {"tokens": "t40 t41"}])
        expected = c.decode("t5 t6", parents=facts, sampling_params=_GREEDY)
        body = {
            "model": server.model,
            "prompt": "t5 t6",
            **_GREEDY,
            "add_special_tokens": False,
            "vllm_xargs": {"choreo_session": c.session, "choreo_parents": [m.id for m in facts]},
        }
        answer = server.client().post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].split() == expected.text.split()[2:]
