# SPDX-License-Identifier: Apache-2.0
"""Open-loop load of a reader's requests about documents that another adapter has encoded.

    python -m benchmarks.variants WRITER READER pair/pair.json [--rates 0.5 1 2] [--passes 2]

The profile is one of `vllm-choreo profile-pair WRITER READER`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.turns import in_turn
from benchmarks.variants.load import SIDES, Pair, run
from benchmarks.variants.page import section


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("writer", help="folder of the adapter that has encoded the documents")
    parser.add_argument("reader", help="of the adapter whose requests are about them")
    parser.add_argument("pair", help="the profile of the two")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--requests", type=int, default=24, help="per side, rate and pass")
    parser.add_argument("--document-tokens", type=int, default=1000)
    parser.add_argument("--target", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--max-quality-loss", type=float, default=0.5, help="of the choice by load")
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    set_environment(4)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    asyncio.run(_measure(args))
    print(section())
    return 0


async def _measure(args: argparse.Namespace) -> None:
    llm = _engine(args)
    pair = Pair(args.writer, args.reader, args.pair, args.max_quality_loss, args.target)
    rows: list[dict[str, Any]] = []
    try:
        for side in SIDES:  # what is done once only shall not be timed
            await run(llm, pair, side, 10.0, 2, args.document_tokens, 10_000)
        for number in range(args.passes):
            for rate in args.rates:
                for side in in_turn(SIDES, number):
                    given = (rate, args.requests, args.document_tokens, number)
                    about = {"pass": number, "rate": rate, "side": side, "target_s": args.target}
                    about["document_tokens"] = args.document_tokens
                    found = await run(llm, pair, side, *given)
                    rows += [{**about, **row} for row in found]
                    print(f"pass {number}: {rate:g} per second, {side}: done", flush=True)
                write_csv("variants", rows, **record())
    finally:
        llm.shutdown()


def _engine(args: argparse.Namespace) -> Any:
    import vllm_choreo

    vllm_choreo.register()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.engine.lora import engine_options
    from vllm_choreo.smallmodel.embedded import embedded_model

    arguments = AsyncEngineArgs(
        str(embedded_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        disable_log_stats=False,
        additional_config={"choreo": {"hidden_memory_gib": 2.0}},
        **engine_options([Path(args.writer), Path(args.reader)]),
    )
    return AsyncLLM.from_engine_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
