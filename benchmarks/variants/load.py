# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive whether or not those before them are done."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine import draw_tokens
from vllm_choreo import AsyncChoreography

QUESTION_TOKENS, ANSWER_TOKENS = 16, 8
# How the reader comes to a document that the writer has encoded.
OWN, PLAIN, PROFILE, ADAPTIVE = "own encoding", "as stored", "profile", "profile by load"
SIDES = (OWN, PLAIN, PROFILE, ADAPTIVE)


@dataclass(frozen=True)
class Pair:
    """Folders of adapters, the profile of the two, and what a choice by the load is given."""

    writer: str
    reader: str
    profile: str
    max_quality_loss: float
    ttft: float

    def session(self, llm: Any, side: str) -> AsyncChoreography:
        """In which the reader's calls are made."""
        if side == OWN:
            return AsyncChoreography(llm, "baseline", adapter=self.reader, placement="both")
        rules: dict[str, Any] = {
            PLAIN: None,
            PROFILE: self.profile,
            ADAPTIVE: {
                "pair": self.profile,
                "max_quality_loss": self.max_quality_loss,
                "ttft": self.ttft,
            },
        }
        return AsyncChoreography(llm, repair=rules[side])


async def run(
    llm: Any, pair: Pair, side: str, rate: float, num_requests: int, num_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """One document per request, encoded by the writer before; a row for each request.

    Args:
        rate: requests per second, on average; times between them are exponential.
        num_tokens: of a document.
        seed: of the times, and of documents: none occurs twice.
    """
    await llm.reset_prefix_cache()
    rng = random.Random(seed)
    async with pair.session(llm, side) as c:
        documents = await _documents(c, pair, side, num_requests, num_tokens, seed)
        begun, tasks = time.perf_counter(), []
        for number, document in enumerate(documents):
            tasks.append(asyncio.create_task(_request(c, pair, side, document, number)))
            await asyncio.sleep(rng.expovariate(rate))
        rows = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun
    return [{**row, "load_s": round(seconds, 3)} for row in rows]


async def _documents(
    c: AsyncChoreography, pair: Pair, side: str, count: int, num_tokens: int, seed: int
) -> Sequence[Any]:
    starts = [(seed * count + number) * num_tokens for number in range(count)]
    calls: list[dict[str, Any]] = [{"tokens": draw_tokens(s, num_tokens)} for s in starts]
    adapter = {} if side == OWN else {"adapter": pair.writer}  # text is encoded when it is read
    found: list[Any] = await c.prefill([{**call, **adapter} for call in calls])
    return found


async def _request(
    c: AsyncChoreography, pair: Pair, side: str, document: Any, number: int
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    header = draw_tokens(30_000 + number * QUESTION_TOKENS, QUESTION_TOKENS)
    adapter = {} if side == OWN else {"adapter": pair.reader}
    answer = await c.decode(header, parents=[document], sampling_params=params, **adapter)
    return {
        "ttft_s": round(answer.metrics.ttft, 6),
        "latency_s": round(answer.metrics.latency, 6),
        "encoded": answer.num_prefilled,
    }
