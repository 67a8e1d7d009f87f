# SPDX-License-Identifier: Apache-2.0
"""One session of 100,000 calls: does the memory of its client or of the engine grow?

    python -m benchmarks.memory.long_session [--calls 100000]
    python -m benchmarks.memory.long_session --mode baseline

Parallel lists of short calls of three generations: documents, notes that read documents, answers
that read both. Messages that got old are freed, so the session holds equally many at any time. No
message descends from more than two others: what a message was encoded with is kept as long as the
message, in tokens, so that it can be encoded again, and a lineage without end would grow without
end. Engine core and worker are processes of their own, with a tiny random model. After every
thousand calls client and worker collect garbage, and what each process holds is noted. Before the
first, steps of all sizes are run: each size leaves something in the caches of vLLM's linear layers.
The control is the same calls as text.
"""

from __future__ import annotations

import argparse
import contextlib
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
from benchmarks.harness.tables import as_text
from benchmarks.memory.bars import flat
from benchmarks.memory.picture import draw_long_session
from benchmarks.memory.tables import LONG_SESSION as CSV
from benchmarks.memory.tables import TABLES

# Calls per turn, a list for each generation.
DOCUMENTS, NOTES, ANSWERS = 40, 30, 30
TURN = DOCUMENTS + NOTES + ANSWERS
KEPT_TURNS = 4  # whose messages are there at any time
PER_SAMPLE = 1000
LARGEST_STEP = 400  # tokens
HEADER_TOKENS, ANSWER_TOKENS = 8, 2  # alike: oneDNN keeps something for each size of a step
PARENTS = 3
VOCAB = (3, 512)  # of the tiny model, special tokens left out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--mode", choices=CSV, default="choreo", help="baseline: the control")
    args = parser.parse_args()
    # So that the core can be asked to collect its garbage.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = "1"  # so small a model gains nothing from more
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        rows = _run(_start_engine(Path(folder)), args.mode, args.calls)
    write_csv(CSV[args.mode], rows, **record())
    if args.mode == "choreo":
        draw_long_session(rows)
    print(as_text(TABLES[name] for name in CSV.values()))
    return int(not flat(rows))


def _start_engine(folder: Path) -> Any:
    """A tiny model, its engine core in a process of its own."""
    import vllm_choreo
    from vllm_choreo.testing.models.tiny import make_tiny_model

    model = make_tiny_model("llama", folder)
    vllm_choreo.register()
    from vllm import LLM

    return LLM(
        str(model), dtype="float32", max_model_len=512, max_num_seqs=TURN, block_size=32,
        # Few, so that all of the pool has been written to soon: until then memory grows by it.
        num_gpu_blocks_override=16 * TURN,
        enforce_eager=True, enable_prefix_caching=True, use_tqdm_on_load=False, seed=0,
    )  # fmt: skip


def _run(llm: Any, mode: str, num_calls: int) -> list[dict[str, Any]]:
    """Rows of calls done and bytes held."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    _warm(llm)
    rng = random.Random(0)
    turns: deque[list[Any]] = deque()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with Choreography(llm, mode=mode) as c:
        for done in range(0, num_calls + 1, TURN):
            if done % PER_SAMPLE == 0:
                rows.append(_sample(llm, c, done, time.perf_counter() - began))
                print(rows[-1], flush=True)
            turns.append(_turn(c, rng, params))
            if len(turns) > KEPT_TURNS:
                c.free(*turns.popleft())
    return rows


def _warm(llm: Any) -> None:
    """A step of every size that lists of calls can make, whenever the core looks for new ones."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    one = SamplingParams(temperature=0.0, max_tokens=1)
    first, end = VOCAB
    for size in range(1, LARGEST_STEP + 1):
        tokens = [first + (37 * size + 11 * i) % (end - first) for i in range(size)]
        llm.generate([TokensPrompt(prompt_token_ids=tokens)], one, use_tqdm=False)


def _turn(c: Any, rng: random.Random, params: Any) -> list[Any]:
    """The messages of one turn."""

    def tokens() -> list[int]:
        return [rng.randrange(*VOCAB) for _ in range(HEADER_TOKENS)]

    def some(messages: list[Any]) -> list[Any]:
        return rng.sample(messages, rng.randint(1, PARENTS))

    documents = c.prefill([{"tokens": tokens()} for _ in range(DOCUMENTS)])
    notes = c.prefill([{"tokens": tokens(), "parents": some(documents)} for _ in range(NOTES)])
    calls = [{"header": tokens(), "parents": some([*documents, *notes])} for _ in range(ANSWERS)]
    return [*documents, *notes, *c.decode(calls, sampling_params=params)]


def _sample(llm: Any, c: Any, done: int, seconds: float) -> dict[str, Any]:
    llm.collective_rpc(_collect)
    _collect()
    processes = _processes()
    return {
        "calls": done,
        "seconds": round(seconds, 2),
        "client_bytes": _held_bytes(os.getpid()),
        "core_bytes": _held_bytes(processes["VLLM::EngineCore"]),
        "worker_bytes": _held_bytes(processes["VLLM::Worker"]),
        "messages": c.stats().get("num_messages", ""),
    }


def _collect(worker: Any = None) -> None:
    """Collect garbage, and give back what the allocator keeps; the worker is sent this, too."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _held_bytes(pid: int) -> int:
    """Memory of a process that is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return sum(1024 * int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def _processes() -> dict[str, int]:
    """Process ids of this process's descendants, by the names that vLLM gives them."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            status = (folder / "status").read_text()
            parents[int(folder.name)] = int(status.partition("\nPPid:")[2].split()[0])
            command = (folder / "cmdline").read_text()
            names[int(folder.name)] = command.partition("\0")[0].partition(" ")[0]
    found, family = {}, {os.getpid()}
    for pid in sorted(parents):  # a child's number is above its parent's, but where they wrap
        if parents[pid] in family:
            family.add(pid)
            found[names[pid]] = pid
    return found


if __name__ == "__main__":
    sys.exit(main())
