# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows, beyond the random choreographies: memory, and ordinary requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.engine.oracle import Oracle, assert_greedy, whole
from vllm_choreo import Choreography
from vllm_choreo.engine.worker import windows

_PROMPTS = [[3 + (7 * i + n) % 500 for i in range(n)] for n in (1, 30, 70, 150)]
_GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
_GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2048)
prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
answers = llm.generate(prompts, SamplingParams(**json.loads(sys.argv[3])), use_tqdm=False)
print("FOUND", json.dumps([answer.outputs[0].token_ids for answer in answers]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gpt_oss"])
def test_ordinary_requests_are_answered_as_without_the_plugin(
    model: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path(model)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    arguments = [str(path), json.dumps(_PROMPTS), json.dumps(_GREEDY)]
    command = [sys.executable, "-c", _GENERATE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    expected = json.loads(lines[-1].removeprefix("FOUND "))
    prompts = [{"prompt_token_ids": tokens} for tokens in _PROMPTS]
    found = engine_slot(path).generate(prompts, SamplingParams(**_GREEDY), use_tqdm=False)
    assert [answer.outputs[0].token_ids for answer in found] == expected


@pytest.mark.parametrize("model", ["gemma3", "mistral_window"])
def test_what_windows_have_left_behind_is_kept(
    model: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> None:
    """A message many windows long, whose beginning is read from close by, later."""
    llm, oracle = engine_slot(tiny_model_path(model)), tiny_oracle(model)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    assert type(group.kv_cache_spec) is FullAttentionSpec
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Choreography(llm) as c:
        long = c.decode(list(range(3, 300)), sampling_params=params)
        llm.generate([{"prompt_token_ids": _PROMPTS[3]}], SamplingParams(**_GREEDY), use_tqdm=False)
        near = c.decode([5, 6], parents=[(long, 0, 40)], sampling_params=params)
        first = whole(oracle.encode(long.token_ids[:40]), 0)
        assert_greedy(long, oracle, [], 0)
        assert_greedy(near, oracle, [first], 40)


def test_the_log_says_what_windows_cost(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(windows.logger, "info_once", lambda text, *args: lines.append(text % args))
    config = engine_slot(tiny_model_path("mistral_window")).llm_engine.vllm_config
    shape = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": config.model_config.dtype,
    }
    window = SlidingWindowSpec(**shape, sliding_window=24)
    full = FullAttentionSpec(**shape)
    widened = windows.widen_windows({"a": window, "b": full}, config)
    assert widened["b"] is full and widened["a"] == FullAttentionSpec(**shape, sliding_window=24)
    # 2,048 tokens of 2 heads of 32 keys and 32 values in float32, per layer; where vLLM lets go,
    # a window, the 256 tokens of a step and what rounding to blocks adds.
    (line,) = lines
    assert line.startswith("1 of 2 layers have sliding windows.")
    assert "a text of 2048 tokens takes 2.0 MiB" in line
    windows.widen_windows({"b": full}, config)
    assert len(lines) == 1
