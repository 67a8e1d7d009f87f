# SPDX-License-Identifier: Apache-2.0
"""Servers under load and abuse for minutes; then every token that they gave is checked.

    python -m benchmarks.soak [load] [routes] [--minutes 4] [--clients 32]
                              [--requests 20000] [--senders 6] [--seed 1]

Two parts, both if none is named. `routes`: see `benchmarks.soak.routes.run`. `load`: half of the
clients hold choreographed sessions of two tenants over a pool with room for a fifth of their
messages: they encode, decode, leave in the middle of streams, name one another's messages, send
nonsense, free, close. The other half asks for ordinary completions. A tiny random model, so that
HuggingFace's model can judge all answers, and not a sample.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.soak.judge import Judge
from benchmarks.soak.routes.run import soak as routes
from benchmarks.soak.tables import COUNTED, TABLES
from benchmarks.soak.users import DOC_TOKENS, DOCS, ChoreoUser, Notes, OrdinaryUser, run_all
from vllm_choreo.testing.server import Server, start_server

PARTS = ("load", "routes")
BLOCK_SIZE = 32
MAX_MODEL_LEN = 640
KEYS = ("alpha", "beta")
# The share of the sessions' messages that fits into the pool.
POOL_SHARE = 0.2


def main() -> int:
    args = _arguments()
    parts, status = args.parts or PARTS, 0
    if "load" in parts:
        with tempfile.TemporaryDirectory() as folder:
            row = soak(Path(folder), args.clients, 60 * args.minutes)
        write_csv("soak", [row], **record())
        print(as_text(TABLES.values()))
        status |= bool(row["wrong_tokens"] or row["failures"] or row["blocks_leaked"])
    if "routes" in parts:
        status |= routes(args.requests, args.senders, args.seed)
    return int(status)


def soak(folder: Path, num_clients: int, seconds: float) -> dict[str, Any]:
    """Run the load on a server of its own and judge it; a row of the results.

    Args:
        folder: for the model and the log.
        num_clients: half of them choreographed.
        seconds: of load.
    """
    from vllm_choreo.testing.models.tiny import make_tiny_model

    model = make_tiny_model("llama", folder)
    num_blocks = pool_blocks(num_clients // 2)
    with start_server(
        model,
        folder,
        keys=KEYS,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        num_gpu_blocks_override=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        enable_prefix_caching=True,
    ) as server:
        notes = asyncio.run(_load(server, num_clients, seconds))
        leaked = _blocks_held(server, num_blocks)
        evicted = _metric(server, "vllm_choreo:evicted_messages_total")
        again = _metric(server, "vllm_choreo:encoded_again_messages_total")
    print(f"{sum(len(n.seen) + len(n.texts) for n in notes)} answers; checking all", flush=True)
    return {
        "clients": num_clients,
        "seconds": round(seconds),
        "pool_blocks": num_blocks,
        **_judged(notes, Judge(model)),
        "evicted": int(evicted),
        "encoded_again": int(again),
        "blocks_leaked": leaked,
    }


def _judged(notes: Sequence[Notes], judge: Judge) -> dict[str, Any]:
    failures = [failure for note in notes for failure in note.failures]
    for failure in failures[:10]:
        print(f"failure: {failure}", file=sys.stderr)
    counts = sum((note.counts for note in notes), Counter())
    answers = [list(seen.message.generated_token_ids) for note in notes for seen in note.seen]
    answers += [generated for note in notes for _, generated in note.texts]
    return {
        **{name: counts[name] for name in COUNTED},
        "tokens_checked": sum(map(len, answers)),
        "wrong_tokens": judge.wrong_tokens(notes),
        "failures": len(failures),
    }


def pool_blocks(num_sessions: int) -> int:
    """Blocks for a fifth of what the sessions hold, and for what runs at a time."""
    per_message = -(-sum(DOC_TOKENS) // 2 // BLOCK_SIZE)
    wanted = int(POOL_SHARE * num_sessions * DOCS * per_message)
    return max(wanted, -(-MAX_MODEL_LEN // BLOCK_SIZE)) + 1  # one is vLLM's null block


async def _load(server: Server, num_clients: int, seconds: float) -> list[Notes]:
    import httpx

    others: list[str] = []
    choreo = [ChoreoUser(server.base_url, KEYS[i % 2], i, others) for i in range(num_clients // 2)]
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    # The server closes a connection that was idle for 5 s; a request that is sent just then fails.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
    async with httpx.AsyncClient(
        base_url=server.base_url, headers=headers, timeout=300, limits=limits
    ) as http:
        ordinary = [OrdinaryUser(http, server.model, 1000 + i) for i in range(num_clients // 2)]
        began = time.monotonic()
        await run_all([*choreo, *ordinary], seconds)
    print(f"load ended after {time.monotonic() - began:.0f} s", flush=True)
    return [*(user.notes for user in choreo), *(user.notes for user in ordinary)]


def _metric(server: Server, name: str) -> float:
    """The value of a metric, summed over its labels."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def _blocks_held(server: Server, num_blocks: int) -> int:
    """Blocks that are still in use when no session is open and no request runs."""
    time.sleep(5)  # vanished clients are noticed, and the numbers told
    with server.client() as client:
        # vLLM tells its numbers with a step.
        client.post("/v1/completions", json={"model": server.model, "prompt": [5], "max_tokens": 2})
    time.sleep(3)
    assert not _metric(server, "vllm_choreo:num_messages")
    return round(num_blocks * _metric(server, "vllm:kv_cache_usage_perc"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    parser.add_argument("--minutes", type=float, default=4.0, help="of load")
    parser.add_argument("--clients", type=int, default=32, help="at a time, under load")
    parser.add_argument("--requests", type=int, default=20_000, help="to all routes")
    parser.add_argument("--senders", type=int, default=6, help="at a time, to all routes")
    parser.add_argument("--seed", type=int, default=1, help="of what is sent to all routes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
