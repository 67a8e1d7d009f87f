# SPDX-License-Identifier: Apache-2.0
"""vLLM without the plugin, in a process of its own: readers of a cached prefix decode.

`StockPrefix` asks, `child` answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.checks import logprobs_of
from benchmarks.harness.child import Child, serve
from benchmarks.harness.engine import (
    forced,
    has_plugin,
    only_token,
    set_environment,
    start_engine,
)
from benchmarks.harness.steps import StepWatch


class StockPrefix:
    """vLLM as it comes, with its own choice of block size.

    Args:
        options: of `vllm.LLM`; what JSON can carry.
    """

    def __init__(self, **options: Any) -> None:
        environment = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "2"}
        self._child = Child.of(__name__, json.dumps(options), **environment)

    def step_seconds(
        self, prefix: Sequence[int], headers: Sequence[Sequence[int]], num_tokens: int
    ) -> list[float]:
        """Of each decode step; one reader per header."""
        steps: list[float] = self._ask(prefix, headers, num_tokens, None)["steps"]
        return steps

    def logprobs(
        self, prefix: Sequence[int], headers: Sequence[Sequence[int]], num_tokens: int
    ) -> list[list[float]]:
        """Of the forced tokens; a list per reader."""
        found: list[list[float]] = self._ask(prefix, headers, num_tokens, 1)["logprobs"]
        return found

    def _ask(
        self,
        prefix: Sequence[int],
        headers: Sequence[Sequence[int]],
        num_tokens: int,
        num_logprobs: int | None,
    ) -> dict[str, Any]:
        question = {
            "prefix": list(prefix),
            "headers": list(map(list, headers)),
            "num_tokens": num_tokens,
            "num_logprobs": num_logprobs,
        }
        answer: dict[str, Any] = self._child.ask(question)
        return answer

    def close(self) -> None:
        """End the process."""
        self._child.close()


def child(options: str) -> None:
    """In the child: an engine, and its answers."""
    set_environment()
    llm = start_engine(None, disable_log_stats=True, **json.loads(options))
    assert not has_plugin(llm), "the plugin is loaded"
    serve(lambda question: _answer(llm, question))


def _answer(llm: Any, question: dict[str, Any]) -> dict[str, Any]:
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=question["prefix"] + h) for h in question["headers"]]
    params = forced(llm, question["num_tokens"], logprobs=question["num_logprobs"])
    with StepWatch(llm) as watch:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    token = only_token(llm)
    return {
        "steps": watch.decode_seconds(len(prompts)),
        "logprobs": [logprobs_of(o.outputs[0].logprobs or (), token) for o in outputs],
    }
