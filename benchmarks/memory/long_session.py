# SPDX-License-Identifier: Apache-2.0
"""One session of 100,000 calls: does the memory of its client or of the engine core grow?

    python -m benchmarks.memory.long_session [--calls 100000]

Parallel lists of short calls, each of which reads some of the messages before; messages that got
old are freed, so the session holds about as many at any time. The engine core is a process of its
own, of a tiny random model. After every thousand calls both processes collect garbage, and what
they hold of the machine's memory is noted.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.memory.page import flat, long_session_section

LIST = 100  # calls, half of them prefills in one list, half of them answers in another
KEPT = 400  # messages that are there at any time
PER_SAMPLE = 1000
HEADER_TOKENS, ANSWER_TOKENS = (3, 12), 2
PARENTS = 3
VOCAB = (3, 512)  # of the tiny model, special tokens left out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    args = parser.parse_args()
    # So that the core can be asked to collect its garbage.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = "1"  # so small a model gains nothing from more
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        rows = _run(_start_engine(Path(folder)), args.calls)
    write_csv("long_session", rows, **record())
    print(long_session_section())
    return int(not flat(rows))


def _start_engine(folder: Path) -> Any:
    """A tiny model, its engine core in a process of its own."""
    import vllm_choreo
    from vllm_choreo.smallmodel.tiny import make_tiny_model

    model = make_tiny_model("llama", folder)
    vllm_choreo.register()
    from vllm import LLM

    return LLM(
        str(model), dtype="float32", max_model_len=512, max_num_seqs=LIST, block_size=32,
        # Few, so that all of the pool has been written to soon: until then memory grows by it.
        num_gpu_blocks_override=4 * KEPT,
        enforce_eager=True, enable_prefix_caching=True, use_tqdm_on_load=False, seed=0,
    )  # fmt: skip


def _run(llm: Any, num_calls: int) -> list[dict[str, Any]]:
    """Rows of calls done and bytes held."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    rng = random.Random(0)
    kept: deque[Any] = deque()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with Choreography(llm) as c:
        kept.extend(c.prefill([{"tokens": _tokens(rng)} for _ in range(KEPT)]))
        for done in range(0, num_calls + 1, LIST):
            if done % PER_SAMPLE == 0:
                rows.append(_sample(llm, c, done, time.perf_counter() - began))
                print(rows[-1], flush=True)
            kept.extend(_calls(c, rng, list(kept), params))
            c.free(*(kept.popleft() for _ in range(LIST)))
    return rows


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(*VOCAB) for _ in range(rng.randint(*HEADER_TOKENS))]


def _calls(c: Any, rng: random.Random, kept: list[Any], params: Any) -> list[Any]:
    """The messages of a parallel list, half of them prefilled, half of them answers."""
    calls = [
        {"tokens" if i < LIST // 2 else "header": _tokens(rng), "parents": rng.sample(kept, k)}
        for i in range(LIST)
        for k in [rng.randint(1, PARENTS)]
    ]
    prefilled = c.prefill(calls[: LIST // 2])
    return [*prefilled, *c.decode(calls[LIST // 2 :], sampling_params=params)]


def _sample(llm: Any, c: Any, done: int, seconds: float) -> dict[str, Any]:
    gc.collect()
    (core,) = llm.collective_rpc(_collected_bytes)
    return {
        "calls": done,
        "seconds": round(seconds, 2),
        "client_bytes": _resident_bytes(),
        "core_bytes": core,
        "messages": c.stats()["num_messages"],
    }


def _collected_bytes(worker: Any) -> int:
    """Sent to the core's process, in which nothing of this module is there."""
    import gc

    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _resident_bytes() -> int:
    """Of this process, in the machine's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
