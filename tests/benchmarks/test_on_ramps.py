# SPDX-License-Identifier: Apache-2.0
"""The benchmark of chats that name nothing measures what it says."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.on_ramps import bars
from benchmarks.on_ramps.chats import Bot, measure_agents, measure_retrieval, retrieval
from tests.engine.test_auto import GREEDY, llm, words

__all__ = ["llm"]  # the fixture


@pytest.mark.exhaustive
def test_the_benchmark(llm: Any) -> None:
    def make() -> Bot:
        return Bot(llm, SamplingParams(temperature=0.0, max_tokens=1))

    bot, documents = make(), [words(300 + n) for n in range(5)]
    bot.check_outputs([retrieval(documents, n) for n in range(2)], GREEDY)
    bot.close()
    bot = make()
    rows = [{k: str(v) for k, v in row.items()} for row in measure_retrieval(bot, documents, 2)]
    bot.close()
    reused = [int(row["reused_tokens"]) for row in rows if row["side"] == "choreo"]
    assert reused[0] == 0 and all(count >= 5 * 40 for count in reused[1:])
    assert bars.first_token_ratio(rows) > 0.0
    assert bars.bars_reached(rows, []), "short prompts have no bar"
    systems = [words(500 + n, 20) for n in range(4)]
    blocks = measure_agents(llm, make, [words(400 + n, 64) for n in range(4)], systems)
    assert bars.blocks_ratio([{k: str(v) for k, v in row.items()} for row in blocks]) > 1.0
    assert blocks[0]["agents"] == len(systems)
