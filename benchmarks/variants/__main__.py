# SPDX-License-Identifier: Apache-2.0
"""A reader's requests about documents that another variant has encoded, alone and under load.

    python -m benchmarks.variants WRITER READER pair/pair.json [--rates 0 0.5 1 2] [--passes 2]
        [--side "own encoding" ...] [--result variants_open]

The profile is one of `vllm-choreo profile-pair WRITER READER`; both are adapters, or models.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.engine import BLOCK_SIZE, set_environment
from benchmarks.harness.record import read_csv, record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.variants.load import Pair, run
from benchmarks.variants.picture import draw
from benchmarks.variants.tables import LOADS, TABLES
from benchmarks.variants.writing import write_documents
from vllm_choreo.repair.layers import entries_of
from vllm_choreo.repair.pair import layers_text
from vllm_choreo.repair.pair_rule import PairRule
from vllm_choreo.repair.rules import ByLayers, rule_given, rule_of
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.trained_adapter import PEFT_FILES

_FEW = 3  # So few rates make no line of a picture.
_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # of the embedded model: layers, key and value, heads, float32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "writer", help="that has encoded the documents: folder of an adapter or a model"
    )
    parser.add_argument("reader", help="whose requests are about them: alike")
    parser.add_argument("pair", help="the profile of the two")
    rates = [0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]
    parser.add_argument("--rates", type=float, nargs="+", default=rates)
    parser.add_argument("--side", action="append", help="one of those that are compared; all")
    parser.add_argument("--layers", nargs="*", default=[], help="further blocks: '[7, 24]'")
    parser.add_argument("--requests", type=int, default=100, help="per side, rate and pass")
    parser.add_argument("--document-tokens", type=int, default=1000)
    parser.add_argument("--target", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--max-quality-loss", type=float, default=0.5, help="of the choice by load")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--result", choices=LOADS, default=LOADS[0], help="name of the CSV file")
    args = parser.parse_args()
    # All documents of a pass stay in the KV cache until they are read.
    set_environment(math.ceil(1 + args.requests * args.document_tokens * _TOKEN_BYTES / 2**30))
    with TemporaryDirectory() as kept:
        pair = _pair(args, Path(kept))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        asyncio.run(_measure(args, pair))
    if len(args.rates) > _FEW:
        draw(read_csv(args.result), args.result)
    print(as_text([TABLES[f"{args.result}_load"]]))
    return 0


def _pair(args: argparse.Namespace, folder: Path) -> Pair:
    """The two variants; what a model writes is written."""
    layers = {}
    for text in args.layers:
        rule = rule_of(rule_given(f'{{"layers": {text}}}'))
        assert isinstance(rule, ByLayers), "what is stored is a side anyway"
        layers[f"layers {layers_text(rule.ranges)}"] = rule.ranges
    given = (args.pair, args.max_quality_loss, args.target, layers)
    if (Path(args.writer) / PEFT_FILES[0]).exists():
        return Pair(args.writer, args.reader, None, *given)
    pair = Pair(None, None, str(folder / "kept"), *given)
    rules = [session_rule(rule, "choreo") for rule in pair.rules.values() if rule is not None]
    needed = {entry for ranges in layers.values() for entry in entries_of(ranges)}
    needed.update(*(rule.keep_hidden for rule in rules if isinstance(rule, PairRule)))
    write_documents(args.writer, folder / "kept", args.requests, args.document_tokens, needed)
    return pair


async def _measure(args: argparse.Namespace, pair: Pair) -> None:
    llm = _engine(args, pair)
    rows: list[dict[str, Any]] = []
    try:
        sides = _sides(args, pair)
        for side in sides:  # what is done once only shall not be timed
            await run(llm, pair, side, 10.0, 2, args.document_tokens, 10_000)
        for number in range(args.passes):
            for rate in args.rates:
                for side in in_turn(sides, number):
                    given = (rate, args.requests, args.document_tokens, number)
                    about = {"pass": number, "rate": rate, "side": side, "target_s": args.target}
                    about["document_tokens"] = args.document_tokens
                    found = await run(llm, pair, side, *given)
                    rows += [{**about, **row} for row in found]
                    how = f"{rate:g} per second" if rate else "one at a time"
                    print(f"pass {number}: {how}, {side}: done", flush=True)
                write_csv(args.result, rows, **record())
    finally:
        llm.shutdown()


def _sides(args: argparse.Namespace, pair: Pair) -> tuple[str, ...]:
    """Sides that the command line asks for."""
    if unknown := set(args.side or ()) - set(pair.sides):
        raise SystemExit(f"--side is one of {', '.join(pair.sides)}, not {', '.join(unknown)}")
    return tuple(side for side in pair.sides if side in (args.side or pair.sides))


def _engine(args: argparse.Namespace, pair: Pair) -> Any:
    import vllm_choreo

    vllm_choreo.register()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.engine.lora import engine_options
    from vllm_choreo.testing.models.embedded import embedded_model

    arguments = AsyncEngineArgs(
        str(embedded_model()) if pair.reader else args.reader,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        disable_log_stats=False,
        additional_config={"choreo": {"hidden_memory_gib": 2.0}},
        **engine_options([Path(one) for one in (pair.writer, pair.reader) if one]),
    )
    return AsyncLLM.from_engine_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
