# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive whether or not those before them are done, or one after another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.engine import draw_tokens
from vllm_choreo import AsyncChoreography
from vllm_choreo.repair.pair import Ranges

QUESTION_TOKENS, ANSWER_TOKENS = 16, 8
# How the reader comes to a document that the writer has encoded.
OWN, PLAIN, PROFILE, ADAPTIVE = "own encoding", "as stored", "profile", "profile by load"
SIDES = (OWN, PLAIN, PROFILE, ADAPTIVE)


@dataclass(frozen=True)
class Pair:
    """Two adapters, or two models; their profile, and what a choice by the load is given.

    Attributes:
        writer, reader: folders of adapters; None: the engine's model is the reader.
        documents: folder of what the writer has encoded, where that is another model.
        layers: further sides, by their names: layers that are encoded anew.
    """

    writer: str | None
    reader: str | None
    documents: str | None
    profile: str
    max_quality_loss: float
    ttft: float
    layers: Mapping[str, Ranges] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[str, ...]:
        """What is compared."""
        return (*SIDES, *self.layers)

    @property
    def rules(self) -> dict[str, Any]:
        """Of the sessions of all sides but the reader's own encoding."""
        return {
            PLAIN: None,
            PROFILE: self.profile,
            ADAPTIVE: {
                "pair": self.profile,
                "max_quality_loss": self.max_quality_loss,
                "ttft": self.ttft,
            },
            **{name: {"layers": [list(one) for one in of]} for name, of in self.layers.items()},
        }

    def session(self, llm: Any, side: str) -> AsyncChoreography:
        """In which the reader's calls are made."""
        if side == OWN:
            worn: dict[str, Any] = {"adapter": self.reader, "placement": "both"}
            worn = worn if self.reader else {}
            return AsyncChoreography(llm, "baseline", **worn)
        return AsyncChoreography(llm, repair=self.rules[side])


async def run(
    llm: Any, pair: Pair, side: str, rate: float, num_requests: int, num_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """One document per request, encoded by the writer before; a row for each request.

    Args:
        rate: requests per second, on average; times between them are exponential. 0: each comes
            when the one before it is done.
        num_tokens: of a document.
        seed: of the times, and of documents.
    """
    await llm.reset_prefix_cache()
    rng = random.Random(seed)
    async with pair.session(llm, side) as c:
        documents = await _documents(c, pair, side, num_requests, num_tokens, seed)
        begun, tasks = time.perf_counter(), []
        for number, document in enumerate(documents):
            tasks.append(asyncio.create_task(_request(c, pair, side, document, number)))
            if rate:
                await asyncio.sleep(rng.expovariate(rate))
            else:
                await tasks[-1]
        rows = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun
    return [{**row, "load_s": round(seconds, 3)} for row in rows]


async def _documents(
    c: AsyncChoreography, pair: Pair, side: str, count: int, num_tokens: int, seed: int
) -> Sequence[Any]:
    if pair.documents is not None and side != OWN:
        loaded: list[Any] = await c.load(pair.documents, on_mismatch="variant", progress=False)
        return loaded[:count]
    adapter = {} if side == OWN else {"adapter": pair.writer}  # text is encoded when it is read
    # Those that are saved are always the same.
    texts = document_tokens(count, num_tokens, seed if pair.documents is None else 0)
    found: list[Any] = await c.prefill([{"tokens": text, **adapter} for text in texts])
    return found


def document_tokens(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Documents, none twice and none with another's beginning, whatever the seeds."""
    # An endless text repeats itself too soon: its documents would be found in the prefix cache.
    draws = (random.Random(f"{seed}/{number}") for number in range(count))
    return [draw.choices(range(1000, 41000), k=num_tokens) for draw in draws]


async def _request(
    c: AsyncChoreography, pair: Pair, side: str, document: Any, number: int
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    header = draw_tokens(30_000 + number * QUESTION_TOKENS, QUESTION_TOKENS)
    adapter: dict[str, Any] = {"adapter": pair.reader} if pair.reader and side != OWN else {}
    answer = await c.decode(header, parents=[document], sampling_params=params, **adapter)
    return {
        "ttft_s": round(answer.metrics.ttft, 6),
        "latency_s": round(answer.metrics.latency, 6),
        "encoded": answer.num_prefilled,
    }
