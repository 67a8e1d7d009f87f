# SPDX-License-Identifier: Apache-2.0
"""Eight calls read the same messages, each in another order: KV blocks, and the time it takes.

    python -m benchmarks.memory [--tokens 4000] [--passes 2]

Choreographed calls share the blocks of the messages. As text, eight orders are eight prompts that
have no prefix in common. The pool is looked at after every model step.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks.harness.engine import (
    BLOCK_SIZE,
    empty_caches,
    kv_block_bytes,
    scheduler_of,
    start_choreo_engine,
)
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.memory.tables import MODES, TABLES

NUM_CALLS = 8
NUM_MESSAGES = 8
HEADER = "Answer:"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000, help="of all messages together")
    # So many that the first call still runs when the last one's prompt has been prefilled.
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    llm = start_choreo_engine(max_model_len=8192)
    _check_outputs(llm)
    rows = []
    for number in range(1, args.passes + 1):
        for mode in in_turn(MODES, number):
            rows.append({"pass": number, "mode": mode, **_measure(llm, mode, args)})
            print(rows[-1], flush=True)
    write_csv("memory", rows, **record())
    print(as_text([TABLES["memory"]]))
    return int(any(row["copies"] > 1 for row in rows if row["mode"] == "choreo"))


def _tokens(llm: Any, num_tokens: int) -> list[list[int]]:
    """`NUM_MESSAGES` texts of equal length, no two alike."""
    from vllm_choreo.lab.cli.demo import TASKS

    text = " ".join(task.question for task in TASKS)
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    size = num_tokens // NUM_MESSAGES
    longer = ids * (2 + num_tokens // len(ids))
    return [longer[37 * i : 37 * i + size] for i in range(NUM_MESSAGES)]


def _orders() -> list[list[int]]:
    """Each call begins with another message, so no two texts have a prefix in common."""
    return [[(i + j) % NUM_MESSAGES for j in range(NUM_MESSAGES)] for i in range(NUM_CALLS)]


def _check_outputs(llm: Any) -> None:
    """Both modes must say the same where they mean the same: a chain in the order of encoding."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for mode in MODES:
        empty_caches(llm)
        with Choreography(llm, mode=mode) as c:
            chain: list[Any] = []
            for tokens in _tokens(llm, 400):
                chain.append(c.prefill(tokens, parents=list(chain)))
            answer = c.decode(HEADER, parents=chain, sampling_params=params)
            answers.append(answer.token_ids)
    if answers[0] != answers[1]:
        raise SystemExit("choreography and baseline differ where they must not: nothing measured")


class _PoolWatch:
    """Looks at the pool after each model step, and keeps what it saw when most was in use."""

    def __init__(self, llm: Any) -> None:
        self.scheduler = scheduler_of(llm)
        self.engine = llm.llm_engine
        self.peak: dict[str, int] = {"running": 0, "used_blocks": 0}
        self._step = self.engine.step

    def __enter__(self) -> _PoolWatch:
        self.engine.step = self._watched_step
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.step = self._step

    def _watched_step(self) -> Any:
        outputs = self._step()
        seen = self._look()
        if (seen["running"], seen["used_blocks"]) > (
            self.peak["running"],
            self.peak["used_blocks"],
        ):
            self.peak = seen
        return outputs

    def _look(self) -> dict[str, int]:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        tables = [
            [block.block_id for block in manager.get_blocks(request.request_id).blocks[0]]
            for request in self.scheduler.running
        ]
        named = [block for blocks in tables for block in blocks]
        return {
            "running": len(tables),
            # One block of the pool is vLLM's null block, which holds nothing.
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "table_entries": len(named),
            "distinct_blocks": len(set(named)),
        }


def _measure(llm: Any, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    params = SamplingParams(temperature=0.0, max_tokens=args.answer_tokens, ignore_eos=True)
    empty_caches(llm)
    start = time.perf_counter()
    with Choreography(llm, mode=mode) as c:
        messages = c.prefill([{"tokens": tokens} for tokens in _tokens(llm, args.tokens)])
        with _PoolWatch(llm) as watch:
            calls = [{"header": HEADER, "parents": [messages[i] for i in o]} for o in _orders()]
            answers = c.decode(calls, sampling_params=params)
    seconds = time.perf_counter() - start
    message_blocks = sum(-(-message.num_tokens // BLOCK_SIZE) for message in messages)
    return {
        **watch.peak,
        "message_tokens": sum(message.num_tokens for message in messages),
        "message_blocks": message_blocks,
        # How many times the messages lie in the pool, the calls' own blocks left out.
        "copies": watch.peak["distinct_blocks"] // message_blocks,
        "last_first_token_s": round(max(answer.metrics.ttft for answer in answers), 3),
        "seconds": round(seconds, 2),
        "block_bytes": kv_block_bytes(llm),
    }


if __name__ == "__main__":
    sys.exit(main())
