# SPDX-License-Identifier: Apache-2.0
"""Time to first token in a parallel debate: choreography against vLLM's prefix caching.

    python -m benchmarks.ttft [--reps 3] [--passes 2] [--answer-tokens 128]

One engine serves both modes, which take turns. Every generated token is forced to be the same in
both, so both read and write equally much. Before anything is timed, a chain of messages must give
the tokens that plain text gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.engine import start_choreo_engine
from benchmarks.harness.probes import chain_tokens, step_times
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.ttft import breakdown
from benchmarks.ttft.bars import MODES, bar_reached
from benchmarks.ttft.debate import add_arguments, debates, run_debate
from benchmarks.ttft.tables import TABLES


def main() -> int:
    args = _arguments()
    llm = start_choreo_engine()
    _check_chain(llm)
    print("chain of messages = plain text: same greedy tokens", flush=True)
    run_debate(llm, "choreo", args, 8)  # what is done once only shall not be timed
    run_debate(llm, "baseline", args, 8)
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        rows += debates(llm, number, args)
        steps += [{"pass": number, **row} for row in step_times(llm, {}, repeats=5)]
    parts = _where_it_goes(llm, args)
    write_csv("ttft", rows, **record())
    write_csv("ttft_steps", steps, **record())
    write_csv("ttft_parts", parts, **record())
    print(as_text(TABLES.values()))
    return int(not bar_reached(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_args()


def _check_chain(llm: Any) -> None:
    """Law 1 on this engine: every message encoded with its predecessors equals the whole text."""
    choreo, baseline = (chain_tokens(llm, {"mode": mode}) for mode in ("choreo", "baseline"))
    if choreo != baseline:
        raise SystemExit("choreography and baseline differ where they must not: nothing timed")


def _where_it_goes(llm: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Parts of the time to first token after round 1, from runs that are not counted above."""
    from vllm_choreo import Choreography

    rows: list[dict[str, Any]] = []
    clock = breakdown.Clock()
    breakdown.install(clock, llm)
    step, results = llm.llm_engine.step, Choreography._results
    state = {"is_open": False, "mode": "", "call": 0}

    def timed_results(self: Any, calls: Any) -> Any:
        state.update(is_open=calls[0].is_decode, call=state["call"] + calls[0].is_decode)
        clock.open()
        return results(self, calls)

    def timed_step() -> Any:
        outputs = step()
        if outputs and state["is_open"]:
            state["is_open"] = False
            for part, ms in clock.close().items():
                rows.append({"mode": state["mode"], "round": state["call"], "part": part,
                             "ms": round(ms, 3), "steps": _in_words(clock.steps)})  # fmt: skip
        return outputs

    Choreography._results = timed_results  # type: ignore[method-assign]
    llm.llm_engine.step = timed_step
    try:
        for _ in range(2):
            for mode in MODES:
                state.update(mode=mode, call=0)
                run_debate(llm, mode, args, min(args.answer_tokens, 128))
    finally:
        Choreography._results = results  # type: ignore[method-assign]
        llm.llm_engine.step = step
        clock.remove()
    return rows


def _in_words(steps: Sequence[tuple[int, int]]) -> str:
    return " + ".join(f"{tokens} tokens of {requests}" for tokens, requests in steps)


if __name__ == "__main__":
    sys.exit(main())
