# SPDX-License-Identifier: Apache-2.0
"""Engines of a few lines, which answer what the test tells them to.

The fake engine generates the token ids 100, 101, … and records every prompt that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

import vllm_choreo.engine.utility as utility
from vllm_choreo import AsyncChoreography
from vllm_choreo.errors import (
    UnsupportedVersionError,
)

VOCAB_SIZE, MAX_MODEL_LEN = 512, 256
Two = SamplingParams(max_tokens=2)


REPORT = {"type": "TooLongError", "parameter": "parents", "value": "[]", "message": "too long"}


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids)


class FakeEngine:
    """Answers each request in as many steps as it has tokens; `refuse[header]` is an error."""

    def __init__(self) -> None:
        self.prompts: list[tuple[list[int], SamplingParams]] = []
        self.operations: list[tuple[Any, ...]] = []
        self.aborted: list[str] = []
        self.refuse: dict[str, dict[str, str]] = {}
        self.vanish: set[str] = set()  # headers of requests that the engine ends
        self.running: dict[str, Any] = {}
        self.is_choreo = True
        self.metrics: Any = None  # vLLM's, if it logs statistics
        self.vllm_config = vllm_config()
        self.adapters: list[Any] = []  # of the prompts

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, lora_request: Any = None
    ) -> None:
        self.prompts.append((prompt["prompt_token_ids"], params))
        self.adapters.append(lora_request)
        self.running[request_id] = (prompt["prompt_token_ids"], params, 0)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> list[Any]:
        return [self.advance(request_id) for request_id in list(self.running)]

    def advance(self, request_id: str) -> Any:
        prompt, params, num_done = self.running[request_id]
        num_done += 1
        self.running[request_id] = (prompt, params, num_done)
        error = self.refuse.get(FakeTokenizer().decode(prompt))
        vanished = FakeTokenizer().decode(prompt) in self.vanish
        token_ids = [] if error else [100 + i for i in range(num_done)]
        # A stop string is found in the second token, by the front end: there is no report.
        stopped = bool(params.stop) and num_done == 2
        finished = bool(error) or vanished or stopped or num_done == params.max_tokens
        transfer = {"choreo_error": error} if error else None
        if finished:
            del self.running[request_id]
            if not error and not stopped and self.is_choreo and params.extra_args:
                transfer = {"choreo": self.report(prompt, params, num_done)}
        reason = (
            ("error" if error or vanished else "stop" if stopped else "length")
            if finished
            else None
        )
        completion = SimpleNamespace(
            token_ids=token_ids,
            text="".join(chr(token) for token in token_ids),
            logprobs=None,
            finish_reason=reason if finished else None,
        )
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=prompt,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=len(prompt) // 4 * 4,
            prompt_logprobs=None,
            kv_transfer_params=transfer,
            metrics=self.metrics,
        )

    def report(self, prompt: list[int], params: SamplingParams, num_done: int) -> dict[str, Any]:
        assert params.extra_args is not None
        wire = params.extra_args["choreo"]
        num_generated = num_done if wire["kind"] == "decode" else 0
        return {
            "id": wire["save_as"],
            "num_tokens": len(prompt) + num_generated,
            "position": 7,
            "exact": False,
            "reused_tokens": 3,
            "repositioned_tokens": 2,
            "encoded_tokens": len(prompt) + num_generated,
        }


# Of a message that the client ended after its third token.
REPORT_OF_END = {
    "position": 5,
    "exact": False,
    "reused_tokens": 3,
    "repositioned_tokens": 0,
    "encoded_tokens": 3,
}


def vllm_config() -> Any:
    model_config = SimpleNamespace(
        model="folder/model",
        served_model_name="model",
        max_model_len=MAX_MODEL_LEN,
        get_vocab_size=lambda: VOCAB_SIZE,
        get_diff_sampling_param=lambda: {"max_tokens": 3},
    )
    return SimpleNamespace(model_config=model_config, lora_config=None)


def make_llm() -> Any:
    return SimpleNamespace(llm_engine=FakeEngine(), get_tokenizer=FakeTokenizer)


def text_of(prompt: tuple[list[int], SamplingParams]) -> str:
    return FakeTokenizer().decode(prompt[0])


def wire_of(prompt: tuple[list[int], SamplingParams]) -> dict[str, Any]:
    assert prompt[1].extra_args is not None
    wire: dict[str, Any] = prompt[1].extra_args["choreo"]
    return wire


def record_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engine operations recorded by the fake engine."""

    def call(llm: Any, *operation: Any) -> Any:
        llm.llm_engine.operations.append(operation)
        return REPORT_OF_END if operation[0] == "end" else {"num_messages": 1}

    async def call_async(llm: Any, *operation: Any) -> Any:
        return call(llm, *operation)

    monkeypatch.setattr(utility, "call", call)
    monkeypatch.setattr(utility, "call_async", call_async)


class FakeQueue:
    """The outputs of one request, one per turn of the event loop."""

    def __init__(self, engine: FakeEngine, request_id: str) -> None:
        self.engine, self.request_id = engine, request_id

    def get_nowait(self) -> None:
        return None

    async def get(self) -> Any:
        await asyncio.sleep(0)
        return self.engine.advance(self.request_id)

    def close(self) -> None:
        pass


class FakeAsyncLLM:
    def __init__(self) -> None:
        self.llm_engine = FakeEngine()
        self.vllm_config = self.llm_engine.vllm_config
        self.get_tokenizer = FakeTokenizer
        self.engine_core = None  # one engine

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        lora_request: Any = None,
        data_parallel_rank: int | None = None,
    ) -> FakeQueue:
        assert data_parallel_rank is None
        await asyncio.sleep(0)
        if prompt["prompt_token_ids"] == [ord("!")]:
            raise UnsupportedVersionError("no")
        self.llm_engine.add_request(request_id, prompt, params, lora_request)
        return FakeQueue(self.llm_engine, request_id)

    async def abort(self, request_id: str, internal: bool) -> None:
        assert internal
        self.llm_engine.abort_request([request_id])


def in_session(
    program: Callable[[AsyncChoreography, FakeEngine], Any], mode: str = "choreo"
) -> FakeEngine:
    llm = FakeAsyncLLM()

    async def run() -> None:
        async with AsyncChoreography(llm, mode=mode) as c:
            await program(c, llm.llm_engine)
            await asyncio.sleep(0)
            assert not llm.llm_engine.running, "nothing is left running"

    asyncio.run(run())
    return llm.llm_engine
