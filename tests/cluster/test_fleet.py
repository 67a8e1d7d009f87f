# SPDX-License-Identifier: Apache-2.0
"""A fleet behind Ray Serve: what one engine says, on all routes, whatever ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from vllm import SamplingParams

from tests.cluster.conftest import GREEDY, LONG, Fleet, streamed
from tests.engine.engines import start_engine, stop_engine
from vllm_choreo import Choreography
from vllm_choreo.errors import FreedMessageError
from vllm_choreo.testing.server import KEYS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # processes of their own

_WORDS = [" ".join(f"t{(7 * i + j) % 400 + 20}" for i in range(40)) for j in range(4)]


@pytest.fixture(scope="module")
def answers(tiny_model_path: Callable[[str], Path]) -> list[tuple[int, ...]]:
    """Answers of one engine that read one, two, three and four messages."""
    llm = start_engine(tiny_model_path("llama"), max_model_len=1024)
    try:
        with Choreography(llm) as c:
            facts = c.prefill([{"tokens": text} for text in _WORDS])
            return [
                c.decode(
                    "t5 t6", parents=facts[: n + 1], sampling_params=SamplingParams(**LONG)
                ).generated_token_ids
                for n in range(4)
            ]
    finally:
        stop_engine(llm)


@pytest.fixture(scope="module")
def fleet(answers: list[tuple[int, ...]], start_fleet: Callable[..., Fleet]) -> Fleet:
    return start_fleet(engines=2, ingresses=2)


def test_answers_are_those_of_one_engine(fleet: Fleet, answers: list[tuple[int, ...]]) -> None:
    with fleet.client() as c, fleet.client() as other:
        facts = c.prefill([{"tokens": text} for text in _WORDS])
        found = c.decode(
            [{"header": "t5 t6", "parents": facts[: n + 1]} for n in range(4)],
            sampling_params=LONG,
        )
        other.prefill(
            "t7 t8 t9"
        )  # what a session is given lies together: this is on another engine
        engines = fleet.engines()
    assert [answer.generated_token_ids for answer in found] == answers
    assert [engine["state"] for engine in engines] == ["running"] * 2
    assert all(engine["messages"] for engine in engines)


def test_all_routes_are_there(fleet: Fleet) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=fleet.base_url, headers=headers, timeout=300) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        body = {"model": "tiny", "prompt": "t5 t6", "max_tokens": 3, "temperature": 0}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        assert "vllm_choreo:num_messages" in http.get("/metrics").text
    assert httpx.get(f"{fleet.base_url}/v1/models").status_code == 401


def test_tenants_are_apart(fleet: Fleet) -> None:
    with fleet.client(KEYS[0]) as ours:
        ours.prefill(_WORDS[0])
        url = f"{fleet.base_url}/v1/choreo/sessions/{ours.session}"
        for key, status in ((KEYS[0], 200), (KEYS[1], 404)):
            answer = httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=300)
            assert answer.status_code == status


def test_what_lies_on_the_other_engine_is_moved(fleet: Fleet) -> None:
    def moved() -> int:
        engines = fleet.engines()
        assert not any(engine["moves"]["failed"] for engine in engines)
        return sum(engine["moves"]["tokens"] for engine in engines)

    def words(first: int, count: int) -> str:
        return " ".join(f"t{(first + 7 * i) % 400 + 20}" for i in range(count))

    with fleet.client() as c:
        before, number = moved(), 0
        while moved() == before:  # calls that have much to encode go to both engines
            number += 1
            assert number < 20, "nothing is moved"
            document = c.prefill(words(number, 300))
            found = c.decode(
                [{"header": words(2 * number, 150), "parents": [document]}] * 6,
                sampling_params=GREEDY,
            )
            assert len({answer.generated_token_ids for answer in found}) == 1


def test_calls_and_a_session_outlive_an_engine(
    fleet: Fleet, answers: list[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with fleet.async_client() as c:
            facts = await c.prefill([{"tokens": text} for text in _WORDS])
            calls = [{"header": "t5 t6", "parents": facts[: n + 1]} for n in range(4)]
            others = asyncio.ensure_future(c.decode(calls, sampling_params=LONG))
            found = await streamed(c, facts, lambda: fleet.kill("engine"))
            assert found == answers[3]
            assert [answer.generated_token_ids for answer in await others] == answers

    asyncio.run(main())
    fleet.wait_for("engine", 2)


def test_calls_outlive_all_engines(fleet: Fleet, answers: list[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with fleet.async_client() as c:
            facts = await c.prefill([{"tokens": text} for text in _WORDS])
            found = await streamed(c, facts, lambda: fleet.kill("engine", count=2))
            assert found == answers[3]
            parents = [facts[1], facts[0]]
            later = await c.decode("t7", parents=parents, sampling_params=GREEDY)
            assert len(later.generated_token_ids) == 8

    asyncio.run(main())


def _ids(fleet: Fleet, session: str) -> set[str]:
    """Ids of a session's messages, as its list says."""
    url = f"{fleet.base_url}/v1/choreo/sessions/{session}/messages"
    answer = httpx.get(url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=300)
    return {message["id"] for message in answer.json()["data"]}


def test_sessions_outlive_an_ingress(fleet: Fleet, answers: list[tuple[int, ...]]) -> None:
    with fleet.client() as c:
        facts = c.prefill([{"tokens": text} for text in _WORDS])
        before = c.decode("t5 t6", parents=facts, sampling_params=LONG)
        c.free(facts[3])
        fleet.kill_ingress_of(KEYS[0])
        again = c.decode("t5 t6", parents=facts[:3], sampling_params=LONG)
        assert again.generated_token_ids == answers[2]
        assert again.id not in {m.id for m in (*facts, before)}
        assert _ids(fleet, c.session) == {m.id for m in (*facts[:3], before, again)}
        with pytest.raises(FreedMessageError):
            c.decode("t5 t6", parents=[facts[3]], sampling_params=GREEDY)
    fleet.wait_for("ingress", 2)


def test_engines_come_and_go_with_the_load(
    fleet: Fleet, start_fleet: Callable[..., Fleet], answers: list[tuple[int, ...]]
) -> None:
    scaled = start_fleet(
        engines=1, max_engines=2, calls_per_engine=4, upscale_delay_s=0, downscale_delay_s=0
    )
    with scaled.client() as c, ThreadPoolExecutor(12) as threads:
        facts = c.prefill([{"tokens": text} for text in _WORDS])
        calls = [{"header": "t5 t6", "parents": facts[: n + 1]} for n in range(4)]
        is_over = threading.Event()

        def keep_asking() -> None:
            while not is_over.is_set():
                found = c.decode(calls, sampling_params=LONG)
                assert [answer.generated_token_ids for answer in found] == answers

        asking = [threads.submit(keep_asking) for _ in range(12)]
        try:
            scaled.wait_for("engine", 2)
            _until(lambda: all(engine["messages"] for engine in scaled.engines()))
        finally:
            is_over.set()
        for one in asking:
            one.result()
        scaled.wait_for("engine", 1)
        found = c.decode(calls, sampling_params=LONG)
        assert [answer.generated_token_ids for answer in found] == answers


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
