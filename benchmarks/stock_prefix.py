# SPDX-License-Identifier: Apache-2.0
"""vLLM without the plugin, in a process of its own: readers of a cached prefix decode.

`StockPrefix` asks, `main` (the child) answers; a line of JSON each. Whoever is not at turn sleeps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import (
    forced,
    only_token,
    run_child,
    scheduler_of,
    set_environment,
    start_engine,
)
from benchmarks.steps import StepWatch


class StockPrefix:
    """vLLM as it comes, with its own choice of block size.

    Args:
        options: of `vllm.LLM`; what JSON can carry.
    """

    def __init__(self, **options: Any) -> None:
        arguments = ["-m", "benchmarks.stock_prefix", json.dumps(options)]
        self._child = run_child(arguments, VLLM_PLUGINS="", VLLM_CPU_KVCACHE_SPACE="2")

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
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("{"):  # vLLM may print, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"stock vLLM ended with status {self._child.wait()}")

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()


def main() -> int:
    set_environment()
    llm = start_engine(None, disable_log_stats=True, **json.loads(sys.argv[1]))
    assert not type(scheduler_of(llm)).__module__.startswith("vllm_choreo"), "the plugin is loaded"
    for line in sys.stdin:
        print(json.dumps(_answer(llm, json.loads(line))), flush=True)
    return 0


def _answer(llm: Any, question: dict[str, Any]) -> dict[str, Any]:
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=question["prefix"] + h) for h in question["headers"]]
    params = forced(llm, question["num_tokens"], logprobs=question["num_logprobs"])
    with StepWatch(llm) as watch:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    token = only_token(llm)
    return {
        "steps": watch.decode_seconds(len(prompts)),
        "logprobs": [
            [step[token].logprob for step in o.outputs[0].logprobs or ()] for o in outputs
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
