# SPDX-License-Identifier: Apache-2.0
"""Ordinary requests to a server, beside choreographed ones and beside others of the same work.

    python -m benchmarks.mixed.over_http [--requests 48] [--passes 2]

A closed loop of 8 clients of /v1/completions. Half of them send ordinary requests. The other half
reads 4 messages, 2,048 tokens: choreographed on one side, in changing order; on the other as text
with a cached prefix. Header and answer are as long on both sides. Timed where the clients are: from
the request to the first token of its stream.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.completions import stream_completion
from benchmarks.harness.engine import draw_tokens
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.mixed.bars import bar_reached, in_words
from benchmarks.mixed.tables import TABLES
from benchmarks.mixed.work import (
    ANSWER_TOKENS,
    HEADER_TOKENS,
    MESSAGE_TOKENS,
    NUM_MESSAGES,
    PROMPT_TOKENS,
    SIDES,
)
from benchmarks.mixed.work import SLOTS as CLIENTS
from vllm_choreo.testing.server import Server, start_server

KEY = "bench"


def main() -> int:
    from vllm_choreo.testing.models.embedded import embedded_model

    args = _arguments()
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(
            embedded_model(),
            Path(folder),
            keys=[KEY],
            env={"VLLM_CPU_KVCACHE_SPACE": "4"},
            max_model_len=4096,
        ) as server,
    ):
        asyncio.run(_measure(server, args, rows))
    write_csv("server", rows, **record())
    print(as_text([TABLES["server"]]))
    return int(not bar_reached(rows))


async def _measure(server: Server, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=300) as http:
        load = await _Load.prepared(http, server.model)
        await load.check_outputs()
        for side in SIDES:
            await load.run(side, 2 * CLIENTS, seed=0)  # what is done once only shall not be timed
        for number in range(1, args.passes + 1):
            for side in in_turn(SIDES, number):
                found = await load.run(side, args.requests, seed=number)
                rows += [{"pass": number, "turn": 0, "side": side, **row} for row in found]
            print(f"pass {number}: {in_words(rows)}", flush=True)


class _Load:
    """The messages on the server, and the same tokens as a prefix."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.http, self.model = http, model
        self.session = ""
        self.messages: list[dict[str, Any]] = []
        self._num_prompts = 0

    @classmethod
    async def prepared(cls, http: httpx.AsyncClient, model: str) -> _Load:
        bench = cls(http, model)
        bench.session = (await http.post("/v1/choreo/sessions", json={})).json()["id"]
        for i in range(NUM_MESSAGES):
            tokens = draw_tokens(i * MESSAGE_TOKENS, MESSAGE_TOKENS)
            call = {
                "type": "prefill",
                "content": tokens,
                "parents": [message["id"] for message in bench.messages],
            }
            url = f"/v1/choreo/sessions/{bench.session}/messages"
            answer = await http.post(url, json=call)
            bench.messages.append(answer.raise_for_status().json())
        return bench

    async def check_outputs(self) -> None:
        """A reader says the same on both sides, in the order in which the messages are a chain."""
        said = [await self._read(side, list(range(700, 716)), 0, 16) for side in SIDES]
        if said[0] != said[1]:
            raise SystemExit(f"the sides differ: {said}: nothing timed")
        print("both sides: the same tokens", flush=True)

    async def _read(self, side: str, header: list[int], turn: int, num_tokens: int) -> list[int]:
        """A reader's request; its tokens."""
        body: dict[str, Any] = {}
        prompt = header
        if side == SIDES[0]:
            ordered = [*self.messages[turn:], *self.messages[:turn]]
            parents = [message["id"] for message in ordered]
            body["vllm_xargs"] = {"choreo_parents": parents, "choreo_session": self.session}
        else:
            prompt = [t for message in self.messages for t in message["token_ids"]] + header
        chunks = stream_completion(self.http, self.model, prompt, num_tokens, **body)
        return [token async for chunk in chunks for token in chunk]

    def _prompt(self, num_tokens: int) -> list[int]:
        """One that begins as no prompt before, so that nothing of it is cached."""
        self._num_prompts += 1
        return [10_000 + self._num_prompts, *range(3000, 2999 + num_tokens)]

    async def run(self, side: str, num_ordinary: int, seed: int) -> list[dict[str, Any]]:
        """Run until so many ordinary requests have ended; a row for each of them."""
        rows: list[dict[str, Any]] = []
        began = time.perf_counter()
        clients = [self._ordinary(rows, num_ordinary, 100 * seed + i) for i in range(CLIENTS)]
        clients += [
            self._reader(side, rows, num_ordinary, 100 * seed + 50 + i) for i in range(CLIENTS)
        ]
        counts = await asyncio.gather(*clients)
        seconds = time.perf_counter() - began
        num_tokens = sum(row["prompt_tokens"] + row["num_generated"] for row in rows)
        load = {"load_s": round(seconds, 3), "tokens_per_s": round(num_tokens / seconds, 2)}
        return [{**row, **load, "readers": sum(counts[CLIENTS:])} for row in rows]

    async def _ordinary(self, rows: list[dict[str, Any]], enough: int, seed: int) -> int:
        rng, num_done = random.Random(seed), 0
        while len(rows) < enough:
            prompt = self._prompt(rng.randint(*PROMPT_TOKENS))
            began, first, num_generated = time.perf_counter(), 0.0, 0
            async for tokens in stream_completion(
                self.http, self.model, prompt, rng.randint(*ANSWER_TOKENS)
            ):
                first = first or time.perf_counter()
                num_generated += len(tokens)
            num_done += 1
            if num_done > 1:  # at first all clients begin at once
                rows.append(
                    {
                        "ttft_s": round(first - began, 6),
                        "latency_s": round(time.perf_counter() - began, 6),
                        "prompt_tokens": len(prompt),
                        "num_generated": num_generated,
                    }
                )
        return num_done

    async def _reader(self, side: str, rows: Sequence[Any], enough: int, seed: int) -> int:
        rng, num_done = random.Random(seed), 0
        while len(rows) < enough:
            turn, num_tokens = rng.randrange(NUM_MESSAGES), rng.randint(*ANSWER_TOKENS)
            await self._read(side, self._prompt(HEADER_TOKENS), turn, num_tokens)
            num_done += 1
        return num_done


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48, help="ordinary ones, per load")
    parser.add_argument("--passes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
