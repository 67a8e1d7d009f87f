# SPDX-License-Identifier: Apache-2.0
"""KV connectors: ordinary requests are stored and loaded, calls never, and no block is mistaken."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import BLOCK_SIZE, start_engine, stop_engine
from tests.engine.offloading import OFFLOADING, copies
from tests.engine.oracle import TIE, Oracle, assert_greedy, random_tokens, whole
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import UnsupportedOptionError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
# 18 blocks of the tiny models, so that every block is soon given away, and host memory for 6.
_BLOCK_BYTES = 3 * 2 * BLOCK_SIZE * 64 * 4
_TIGHT = {"num_gpu_blocks_override": 19, "max_model_len": 18 * BLOCK_SIZE}


@pytest.fixture(params=sampled(["in_place", "queries"], 1))
def llm(request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path]) -> Iterator[Any]:
    choreo: dict[str, Any] = {"host_memory_gib": 6.5 * _BLOCK_BYTES / 2**30}
    if request.param == "in_place":
        choreo["reposition"] = "in_place"
    engine = start_engine(
        tiny_model_path("llama"),
        kv_transfer_config=OFFLOADING,
        additional_config={"choreo": choreo},
        **_TIGHT,
    )
    yield engine
    stop_engine(engine)


@pytest.fixture
def oracle(tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle("llama")


def _generate(llm: Any, oracle: Oracle, prompt: Sequence[int], num_tokens: int = 6) -> None:
    """Answer of an ordinary request, which is that of the whole text."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    tokens = [*prompt, *output.outputs[0].token_ids]
    logits = oracle.plain_logits(tokens)
    for index in range(len(prompt), len(tokens)):
        assert logits[index - 1].max() - logits[index - 1, tokens[index]] < TIE


def _forget(llm: Any) -> None:
    """Drop vLLM's prefix cache: what is found of prompts now, the connector has."""
    assert llm.llm_engine.reset_prefix_cache()


def test_calls_are_neither_stored_nor_loaded(llm: Any, oracle: Oracle) -> None:
    text = random_tokens(random.Random(1), 4 * BLOCK_SIZE + 5)
    beginning, rest = text[: 3 * BLOCK_SIZE], text[3 * BLOCK_SIZE :]

    def read() -> None:
        # The virtual sequence of a call is the very prompt of an ordinary request.
        with Choreography(llm) as c:
            message = c.prefill(beginning)
            for parents in ([message], [c.prefill(beginning)]):  # and of its duplicate
                answer = c.decode(rest, parents=parents, sampling_params=GREEDY)
                assert_greedy(answer, oracle, [whole(oracle.encode(beginning), 0)], len(beginning))

    read()
    assert copies().num_stored == 0
    _generate(llm, oracle, text)
    _generate(llm, oracle, random_tokens(random.Random(2), 9))  # steps in which it is stored
    assert copies().num_stored == 4
    _forget(llm)
    read()
    assert copies().num_loaded == 0
    _forget(llm)
    _generate(llm, oracle, text)
    assert copies().num_loaded == copies().num_stored == 4


def test_blocks_are_copied_out_before_calls_write_them(llm: Any, oracle: Oracle) -> None:
    """A call gets the blocks of a prompt in the step after it, from host memory and moved, too."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, 15 * BLOCK_SIZE + 9) for _ in range(3)]
    documents = [random_tokens(rng, 5 * BLOCK_SIZE), random_tokens(rng, 4 * BLOCK_SIZE)]
    encoded = [oracle.encode(tokens) for tokens in documents]
    with Choreography(llm) as c:
        messages = c.prefill([{"tokens": tokens} for tokens in documents])
        for prompt, offset in zip(prompts, (0, 40, 70), strict=True):
            _generate(llm, oracle, prompt, num_tokens=1)  # for which the messages are evicted
            header = random_tokens(rng, BLOCK_SIZE + 5)
            answer = c.decode(
                header,
                parents=messages,
                offsets=[offset, offset + 200],
                new_offset=offset + 400,
                sampling_params=GREEDY,
            )
            parents = [whole(e, offset + 200 * n) for n, e in enumerate(encoded)]
            assert_greedy(answer, oracle, parents, offset + 400)
        assert c.stats()["num_evictions"] >= 4
    for prompt in prompts:
        _forget(llm)
        before = copies().num_loaded
        _generate(llm, oracle, prompt)
        assert copies().num_loaded - before == 15


def test_calls_wait_for_blocks_that_a_connector_fills(llm: Any, oracle: Oracle) -> None:
    """Nothing runs in the steps in which it does, and yet the call will get on."""
    rng = random.Random(6)
    tokens, prompt = random_tokens(rng, 9 * BLOCK_SIZE), random_tokens(rng, 15 * BLOCK_SIZE + 9)
    _generate(llm, oracle, prompt)
    _generate(llm, oracle, random_tokens(rng, 9))
    _forget(llm)
    with Choreography(llm) as c:
        message = c.prefill(tokens)
        params = [GREEDY, GREEDY.clone()]
        params[1].extra_args = {"choreo": {"session": c.session, "parents": [message.id]}}
        inputs = [{"prompt_token_ids": given} for given in (prompt, [5, 6])]
        _, output = llm.generate(inputs, params, use_tqdm=False)
        assert output.kv_transfer_params["choreo"]["reused_tokens"] == len(tokens)
    assert copies().num_loaded == 15


def test_loaded_messages_leave_alone_what_is_still_copied_out(
    llm: Any, oracle: Oracle, tmp_path: Path
) -> None:
    rng = random.Random(4)
    tokens, prompt = random_tokens(rng, 10 * BLOCK_SIZE), random_tokens(rng, 15 * BLOCK_SIZE + 9)
    with Choreography(llm) as c:
        c.save([c.prefill(tokens, save_as="m")], str(tmp_path), encodings=True)
    _generate(llm, oracle, prompt, num_tokens=1)
    with Choreography(llm) as c:
        c.load(str(tmp_path))  # between two steps, into the blocks that the prompt had
        answer = c.decode([5, 6], parents=["m"], sampling_params=GREEDY)
        assert_greedy(answer, oracle, [whole(oracle.encode(tokens), 0)], len(tokens))
    _forget(llm)
    _generate(llm, oracle, prompt)
    assert copies().num_loaded == 15


def test_parameters_of_a_connector_are_for_ordinary_requests(llm: Any) -> None:
    given = {"kv_transfer_params": {"do_remote_decode": True}}
    params = SamplingParams(max_tokens=2, extra_args=given)
    with Choreography(llm) as c, pytest.raises(UnsupportedOptionError, match="kv_transfer_params"):
        c.decode([5, 6, 7], sampling_params=params)
