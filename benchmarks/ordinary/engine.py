# SPDX-License-Identifier: Apache-2.0
"""One side of the comparison: an engine in a process of its own, and the batch that it runs."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.child import serve
from benchmarks.harness.engine import (
    BLOCK_SIZE,
    empty_caches,
    has_plugin,
    set_environment,
    start_engine,
)

# Name: block size (None: vLLM's own choice), VLLM_PLUGINS.
SIDES: dict[str, tuple[int | None, str]] = {
    "plugin": (BLOCK_SIZE, "choreo"),
    "stock": (BLOCK_SIZE, ""),
    "stock, default blocks": (None, ""),
}


def child(side: str, num_requests: str) -> None:
    """Start an engine, then run the batch each time it is asked."""
    from vllm.inputs import TokensPrompt

    set_environment()
    block_size, plugins = SIDES[side]
    llm = start_engine(block_size, disable_log_stats=True)
    assert has_plugin(llm) == bool(plugins), "the plugin is where it should not be, or is missing"
    prompts, params = _batch(llm, int(num_requests))
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]

    def answer(question: Any) -> dict[str, Any]:
        empty_caches(llm)
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - start,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "prompt_tokens": sum(map(len, prompts)),
            "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        }

    serve(answer)


def _batch(llm: Any, num_requests: int) -> tuple[list[list[int]], list[Any]]:
    """Questions about passages, of 20 to 190 tokens, with answers of 8 to 48 tokens."""
    from vllm import SamplingParams

    from vllm_choreo.lab.cli.demo import AGENTS, TASKS
    from vllm_choreo.lab.workflows.chat import assistant, system, user

    prompts, params = [], []
    for i in range(num_requests):
        question = TASKS[i % len(TASKS)].question
        if i % 3 == 2:
            question = question.rpartition("\n\n")[2]
        text = system(AGENTS[i % len(AGENTS)]) + user(question) + assistant()
        prompts.append(llm.get_tokenizer().encode(text, add_special_tokens=False))
        params.append(SamplingParams(temperature=0.0, max_tokens=8 * (1 + i % 6), ignore_eos=True))
    return prompts, params
