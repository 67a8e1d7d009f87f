# SPDX-License-Identifier: Apache-2.0
"""From how many tokens on an answer is moved to its reader rather than encoded there again.

    python -m benchmarks.planner.moves [--tokens 16 64 256] [--turns 7]

Both ways end with the reader's next token, greedily, and in both it says the same or the run fails:
a moved message was encoded at position 0 with nothing before it, as the text is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness.engine import set_environment
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.planner.moves.tables import ENCODED, MOVED, NAME, TABLES

_HEADER = "\nIn short:"
_SAMPLING = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [8, 16, 32, 64, 128, 256, 512]
    parser.add_argument("--tokens", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # each engine in a process of its own
    rows = asyncio.run(_measured(args))
    write_csv(NAME, rows, **record())
    print(as_text(TABLES.values()))
    return 0


async def _measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo import AsyncChoreography
    from vllm_choreo.planner import FacadeWorker
    from vllm_choreo.testing.models.embedded import embedded_model

    arguments = AsyncEngineArgs(
        str(embedded_model()), dtype="float32", enforce_eager=True, max_model_len=2048
    )
    engines = [AsyncLLM.from_engine_args(arguments) for _ in range(2)]
    rows: list[dict[str, Any]] = []
    try:
        async with AsyncChoreography(engines[0]) as one, AsyncChoreography(engines[1]) as two:
            home, reader = FacadeWorker(one), FacadeWorker(two)
            words = _Words(engines[0].get_tokenizer())
            await _turn(home, reader, words.text(64), 0)  # first calls of a process are slow
            for tokens in args.tokens:
                for turn in range(args.turns):
                    text = words.text(tokens)
                    for way, seconds in (await _turn(home, reader, text, turn)).items():
                        rows.append({"tokens": tokens, "way": way, "seconds": round(seconds, 5)})
                print(rows[-2:], flush=True)
    finally:
        for engine in engines:
            engine.shutdown()
    return rows


async def _turn(home: Any, reader: Any, text: str, turn: int) -> dict[str, float]:
    """Seconds of each way. Raises SystemExit: they differ in what is said."""
    written = await home.prefill(text, (), False)
    taken: list[Any] = []

    async def moved() -> Any:
        taken.append(await reader.take(await home.give(written)))
        return await reader.decode(_HEADER, taken, False, _SAMPLING)

    async def encoded() -> Any:
        return await reader.decode(text + _HEADER, (), False, _SAMPLING)

    ways: dict[str, Callable[[], Awaitable[Any]]] = {MOVED: moved, ENCODED: encoded}
    found, said = {}, set()
    for way in in_turn(list(ways), turn):
        begun = time.perf_counter()
        answer = await ways[way]()
        found[way] = time.perf_counter() - begun
        said.add(answer.text)
        await reader.free(answer.messages())
    await reader.free(taken)
    await home.free([written])
    if len(said) > 1:
        raise SystemExit(f"moved and encoded again, the next token differs: {said}")
    return found


class _Words:
    """Texts that nobody has read before, of as many tokens as are asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode, self._decode = tokenizer.encode, tokenizer.decode
        self._rng = random.Random(7)

    def text(self, num_tokens: int) -> str:
        drawn = " ".join(str(self._rng.randrange(1000)) + " and" for _ in range(num_tokens))
        return str(self._decode(self._encode(drawn)[:num_tokens]))


if __name__ == "__main__":
    sys.exit(main())
