# SPDX-License-Identifier: Apache-2.0
"""Ways in which vLLM runs an engine: asynchronous scheduling, processes, and without the plugin."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography
from tests.engine.engines import start_engine, stop_engine
from tests.engine.oracle import Oracle, whole
from tests.engine.scheduling import asynchronous_scheduling
from vllm_choreo import AsyncChoreography, Choreography
from vllm_choreo.engine import utility

DOC = [(11 * i) % 450 + 20 for i in range(70)]
NOTE = [(17 * i) % 450 + 20 for i in range(33)]
HEADER = [5, 6, 7]
# Float32 sums in another order: measured differences stay below 1e-4.
LOGPROB_TOLERANCE = 5e-4


def _greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, **options
    )


def _raw(num_tokens: int, **wire: Any) -> SamplingParams:
    return _greedy(num_tokens, extra_args={"choreo": {"session": "raw", **wire}})


def _assert_oracle(oracle: Oracle, tokens: Any, num_header: int, parents: Any, at: int) -> None:
    """Every generated token is the oracle's, given those before it, or ties with it."""
    logprobs = oracle.encode(tokens, parents, at).logprobs()
    for i in range(num_header, len(tokens)):
        row = logprobs[i - 1]
        assert row.max() - row[tokens[i]] < 1e-3


# -- asynchronous scheduling -----------------------------------------------------------------------


@pytest.fixture
def async_scheduling() -> Iterator[None]:
    with asynchronous_scheduling():
        yield


@pytest.fixture
def async_llm(
    async_scheduling: None, tiny_model_path: Callable[[str], Path], request: Any
) -> Iterator[Any]:
    """An engine in this process that plans a step before the one before it has been sampled."""
    llm = start_engine(tiny_model_path("llama"), **getattr(request, "param", {}))
    core = llm.llm_engine.engine_core.engine_core
    assert type(core.scheduler).__name__ == "ChoreoAsyncScheduler"
    in_flight = []
    schedule = core.scheduler.schedule

    def watch(*args: Any) -> Any:
        in_flight.append(sum(r.num_output_placeholders for r in core.scheduler.running))
        return schedule(*args)

    core.scheduler.schedule = watch
    yield llm
    assert max(in_flight) > 0, "some step must have been planned ahead"
    stats = utility.call(llm, "stats", None)
    assert stats["num_calls"] == stats["num_messages"] == 0
    assert stats["num_free_blocks"] == stats["num_pool_blocks"] - 1
    stop_engine(llm)


@pytest.mark.exhaustive
def test_random_choreographies_with_asynchronous_scheduling(
    async_llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    for seed in range(8):
        with Choreography(async_llm) as c:
            check(c, tiny_oracle("llama"), draw_choreography(seed))


@pytest.mark.parametrize(
    "async_llm", [{"num_gpu_blocks_override": 21, "max_model_len": 640}], indirect=True
)
def test_preemption_and_eviction_with_asynchronous_scheduling(
    async_llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    """Calls that outgrow a pool of 20 blocks while they generate, then evicted parents."""
    oracle = tiny_oracle("llama")
    doc_keys = oracle.encode(DOC)
    with Choreography(async_llm) as c:
        doc = c.prefill(DOC)
        calls = [{"header": [20 + i, 9], "parents": [doc]} for i in range(6)]
        for answer in c.decode(calls, sampling_params=_greedy(100)):
            assert len(answer.generated_token_ids) == 100
            _assert_oracle(oracle, answer.token_ids, 2, [whole(doc_keys, 0)], len(DOC))
        made = c.decode(HEADER, parents=[doc], offsets=[30], sampling_params=_greedy(40))
        made_keys = oracle.encode(made.token_ids, [whole(doc_keys, 30)], made.position)
        c.evict(doc, made)
        items = [{"header": HEADER, "parents": [made, doc], "offsets": [9, i]} for i in range(5)]
        for i, answer in enumerate(c.decode(items, sampling_params=_greedy(6))):
            parents = [whole(made_keys, 9), whole(doc_keys, i)]
            _assert_oracle(oracle, answer.token_ids, 3, parents, i + len(DOC))
        assert c.stats()["num_evictions"] > 0


@pytest.mark.exhaustive
def test_calls_that_end_early_with_asynchronous_scheduling(
    async_llm: Any, tiny_oracle: Callable[[str], Oracle]
) -> None:
    """A token that stops a call arrives when one more has been planned behind it."""
    oracle = tiny_oracle("llama")
    with Choreography(async_llm) as c:
        doc = c.prefill(DOC)
        free_run = c.decode(HEADER, parents=[doc], sampling_params=_greedy(30))
        doc_keys = oracle.encode(DOC)
        for i in (0, 3, 17, 28):  # 3 header tokens: 28 ends one token before a block does
            stop = [free_run.generated_token_ids[i]]
            params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=stop)
            made = c.decode(HEADER, parents=[doc], sampling_params=params)
            assert made.token_ids[-1] == stop[0]
            made_keys = oracle.encode(made.token_ids, [whole(doc_keys, 0)], len(DOC))
            reader = c.decode([8], parents=[made], sampling_params=_greedy(5))
            _assert_oracle(oracle, reader.token_ids, 1, [whole(made_keys, 0)], made.num_tokens)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # tests/server asks such an engine in every run
@pytest.mark.slow
def test_one_batch_of_both_kinds_in_an_engine_process(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary requests, calls, a refused one and a waiting one, all in one `LLM.generate`."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = start_engine(tiny_model_path("llama"))
    try:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core"), "it has its own process"
        free_blocks = utility.call(llm, "stats", None)["num_free_blocks"]
        text = [*DOC, *NOTE, *HEADER]
        prompts = [text, DOC, NOTE, HEADER, [8], [9], HEADER]
        params = [
            _greedy(8),
            _raw(1, kind="prefill", save_as="doc"),
            _raw(1, kind="prefill", save_as="note", parents=["doc"]),
            _raw(8, save_as="answer", parents=["doc", "note"]),
            _raw(8, parents=["answer"], save_as="reader"),
            _raw(8, parents=["nobody"]),
            _greedy(8),
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        plain, answer, bad = outputs[0], outputs[3], outputs[5]
        assert answer.kv_transfer_params["choreo"]["exact"]
        assert plain.outputs[0].token_ids == answer.outputs[0].token_ids
        for one, other in zip(plain.outputs[0].logprobs, answer.outputs[0].logprobs, strict=True):
            (mine,), (theirs,) = one.values(), other.values()
            assert abs(mine.logprob - theirs.logprob) < LOGPROB_TOLERANCE
        assert bad.outputs[0].finish_reason == "error"
        assert bad.kv_transfer_params["choreo_error"]["type"] == "UnknownMessageError"
        reader = outputs[4].kv_transfer_params["choreo"]
        assert (reader["reused_tokens"], reader["num_tokens"]) == (11, 9)
        (alone,) = llm.generate([requests[6]], params[6], use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[6].outputs[0].token_ids
        assert utility.call(llm, "free", "raw", ["answer", "nobody"]) == 1
        assert utility.call(llm, "close", "raw") == 3
        assert utility.call(llm, "stats", None)["num_free_blocks"] == free_blocks
    finally:
        stop_engine(llm)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_streams_and_waiting_children_in_an_asynchronous_engine_process(
    async_scheduling: None,
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> None:
    """AsyncLLM: the engine core in another process, here with asynchronous scheduling as on GPU."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        str(tiny_model_path("llama")), dtype="float32", enforce_eager=True, max_model_len=2048
    )
    oracle = tiny_oracle("llama")
    doc_keys = oracle.encode(DOC)

    async def converse(c: AsyncChoreography) -> None:
        doc = await c.prefill(DOC)
        stream = c.stream_decode(HEADER, parents=[doc], sampling_params=_greedy(24))
        pieces = [piece async for piece in stream]
        assert len(pieces) > 3
        streamed = pieces[-1].message
        assert streamed is not None
        draft = await c.submit(header=HEADER, parents=[doc], sampling_params=_greedy(24))
        child = await c.submit(
            header=[8], parents=[draft, doc], offsets=[100, 0], sampling_params=_greedy(8)
        )
        read, made = await child, await draft
        assert made.token_ids == streamed.token_ids
        made_keys = oracle.encode(made.token_ids, [whole(doc_keys, 0)], len(DOC))
        parents = [whole(made_keys, 100), whole(doc_keys, 0)]
        _assert_oracle(oracle, read.token_ids, 1, parents, len(DOC))

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(args)
        try:
            assert llm.vllm_config.scheduler_config.scheduler_cls.endswith("ChoreoAsyncScheduler")
            async with AsyncChoreography(llm) as c:
                await asyncio.gather(*(converse(c) for _ in range(3)))
            async with AsyncChoreography(llm) as c:
                stats = await c.stats()
                assert stats["num_free_blocks"] == stats["num_pool_blocks"] - 1
        finally:
            llm.shutdown()

    asyncio.run(run())


# -- without the plugin ----------------------------------------------------------------------------

_LOOK = """
import json, sys
from vllm import LLM
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256)
config = llm.llm_engine.vllm_config
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
found = {
    "block_size": config.cache_config.block_size,
    "scheduler": type(scheduler).__module__,
    "worker": config.parallel_config.worker_cls,
    "ours": sorted(m for m in sys.modules if m.startswith("vllm_choreo")),
}
print("FOUND", json.dumps(found))
"""


@pytest.mark.exhaustive
def test_vllm_is_untouched_without_the_plugin(tiny_model_path: Callable[[str], Path]) -> None:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", _LOOK, str(tiny_model_path("llama"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    assert json.loads(lines[-1].removeprefix("FOUND ")) == {
        "block_size": 128,
        "scheduler": "vllm.v1.core.sched.scheduler",
        "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
        "ours": [],
    }
