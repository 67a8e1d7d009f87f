# SPDX-License-Identifier: Apache-2.0
"""A server under load and abuse for minutes; then every token that it gave is checked.

    python -m benchmarks.soak [--minutes 4] [--clients 32]

Half of the clients hold choreographed sessions of two tenants over a pool with room for a fifth of
their messages: they encode, decode, leave in the middle of streams, name one another's messages,
send nonsense, free, close. The other half asks for ordinary completions. A tiny random model, so
that its dense oracle can judge all answers, and not a sample.
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

from benchmarks.common import command_line, machine, machine_line, read_csv, table, write_csv
from benchmarks.soak_clients import DOC_TOKENS, DOCS, ChoreoUser, Notes, OrdinaryUser, Seen, run_all
from vllm_choreo.semantics.message import Message

BLOCK_SIZE = 32
MAX_MODEL_LEN = 640
KEYS = ("alpha", "beta")
# The share of the sessions' messages that fits into the pool.
POOL_SHARE = 0.2


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        row = soak(Path(folder), args.clients, 60 * args.minutes)
    write_csv("soak", [row], **machine(), command=command_line("soak"))
    print(section())
    return int(bool(row["wrong_tokens"] or row["failures"] or row["blocks_leaked"]))


def soak(folder: Path, num_clients: int, seconds: float) -> dict[str, Any]:
    """Run the load on a server of its own and judge it; a row of the results.

    Args:
        folder: for the model and the log.
        num_clients: half of them choreographed.
        seconds: of load.
    """
    from tests.engine.models import make_tiny_model
    from tests.engine.oracle import Oracle
    from tests.server.serving import start_server

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
    wrong = _Judge(Oracle(model)).wrong_tokens(notes)
    failures = [failure for note in notes for failure in note.failures]
    for failure in failures[:10]:
        print(f"failure: {failure}", file=sys.stderr)
    counts = sum((note.counts for note in notes), Counter())
    return {
        "clients": num_clients,
        "seconds": round(seconds),
        "pool_blocks": num_blocks,
        **{name: counts[name] for name in _COUNTED},
        "tokens_checked": sum(
            len(s.message.generated_token_ids) for n in notes for s in n.seen
        ) + sum(len(generated) for n in notes for _, generated in n.texts),
        "evicted": int(evicted),
        "encoded_again": int(again),
        "wrong_tokens": wrong,
        "failures": len(failures),
        "blocks_leaked": leaked,
    }  # fmt: skip


_COUNTED = (
    "prefill", "decode", "leave", "workflow", "exact", "free", "mistake", "unknown", "refused",
    "ordinary",
)  # fmt: skip


def pool_blocks(num_sessions: int) -> int:
    """Blocks for a fifth of what the sessions hold, and for what runs at a time."""
    per_message = -(-sum(DOC_TOKENS) // 2 // BLOCK_SIZE)
    wanted = int(POOL_SHARE * num_sessions * DOCS * per_message)
    return max(wanted, -(-MAX_MODEL_LEN // BLOCK_SIZE)) + 1  # one is vLLM's null block


async def _load(server: Any, num_clients: int, seconds: float) -> list[Notes]:
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
    return [user.notes for user in [*choreo, *ordinary]]


def _metric(server: Any, name: str) -> float:
    """The value of a metric, summed over its labels."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def _blocks_held(server: Any, num_blocks: int) -> int:
    """Blocks that are still in use when no session is open and no request runs."""
    time.sleep(5)  # vanished clients are noticed, and the numbers told
    with server.client() as client:
        # vLLM tells its numbers with a step.
        client.post("/v1/completions", json={"model": server.model, "prompt": [5], "max_tokens": 2})
    time.sleep(3)
    assert not _metric(server, "vllm_choreo:num_messages")
    return round(num_blocks * _metric(server, "vllm:kv_cache_usage_perc"))


class _Judge:
    """The dense oracle over all notes."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self._encoded: dict[str, Any] = {}

    def wrong_tokens(self, notes: Sequence[Notes]) -> int:
        wrong = 0
        for note in notes:
            self._encoded.clear()
            for seen in note.seen:
                wrong += self._wrong(seen)
            for prompt, generated in note.texts:
                logits = self.oracle.plain_logits([*prompt, *generated])
                wrong += _not_greedy(logits, len(prompt), generated)
        return wrong

    def _wrong(self, seen: Seen) -> int:
        from tests.engine.oracle import Parent

        message, generated = seen.message, seen.message.generated_token_ids
        num_header = message.num_tokens - len(generated)
        if seen.is_text:
            prompt = [t for doc, *_ in seen.parents for t in doc.token_ids]
            logits = self.oracle.plain_logits([*prompt, *message.token_ids])
            return _not_greedy(logits, len(prompt) + num_header, generated)
        parents = [
            Parent(self._encoding(parent), offset, start, stop)
            for parent, start, stop, offset in seen.parents
        ]
        encoded = self.oracle.encode(message.token_ids, parents, seen.new_offset)
        self._encoded[message.id] = encoded
        return _not_greedy(encoded.logits, num_header, generated)

    def _encoding(self, message: Message) -> Any:
        """Documents are encoded alone; generated messages were judged, and encoded, before."""
        if message.id not in self._encoded:
            self._encoded[message.id] = self.oracle.encode(message.token_ids)
        return self._encoded[message.id]


def _not_greedy(logits: Any, num_prompt: int, generated: Sequence[int]) -> int:
    """Generated tokens that are not the oracle's best, nor tie with it."""
    from tests.engine.oracle import TIE

    return sum(
        bool(logits[num_prompt + i - 1].max() - logits[num_prompt + i - 1][token] >= TIE)
        for i, token in enumerate(generated)
    )


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("soak")
    if not rows:
        return ""
    row = rows[0]
    return "\n\n".join(
        [
            "## Soak: a server under load and abuse",
            f"{row['clients']} clients for {row['seconds']} s, half of them choreographed, of two "
            f"tenants, over a pool of {row['pool_blocks']} blocks: room for a fifth of their "
            "messages. They leave in the middle of streams, name messages of others, send what is "
            "illegal, free and close. All answers are compared with the dense oracle.",
            table(
                ("what", "number"),
                [
                    (name.replace("_", " "), row[name])
                    for name in (*_COUNTED, "evicted", "encoded_again", "tokens_checked")
                ],
            ),
            f"Wrong tokens: {row['wrong_tokens']}. Unexpected failures: {row['failures']}. Blocks "
            f"leaked: {row['blocks_leaked']}.",
            machine_line(rows),
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
