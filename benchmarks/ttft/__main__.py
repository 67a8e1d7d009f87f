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

from benchmarks.harness.engine import empty_caches, forced, start_choreo_engine
from benchmarks.harness.probes import QUESTION, ROLES, chain_tokens, step_times
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn
from benchmarks.ttft import breakdown
from benchmarks.ttft.bars import MODES, bar_reached, ttfts
from benchmarks.ttft.tables import TABLES


def main() -> int:
    args = _arguments()
    llm = start_choreo_engine()
    _check_chain(llm)
    print("chain of messages = plain text: same greedy tokens", flush=True)
    _debate(llm, "choreo", args, 8)  # what is done once only shall not be timed
    _debate(llm, "baseline", args, 8)
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        rows += _pass(llm, number, args)
        steps += [{"pass": number, **row} for row in step_times(llm, {}, repeats=5)]
    parts = _where_it_goes(llm, args)
    write_csv("ttft", rows, **record())
    write_csv("ttft_steps", steps, **record())
    write_csv("ttft_parts", parts, **record())
    print(as_text(TABLES.values()))
    return int(not bar_reached(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=3, help="debates per mode and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--agents", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=128)
    return parser.parse_args()


def _check_chain(llm: Any) -> None:
    """Law 1 on this engine: every message encoded with its predecessors equals the whole text."""
    choreo, baseline = (chain_tokens(llm, {"mode": mode}) for mode in ("choreo", "baseline"))
    if choreo != baseline:
        raise SystemExit("choreography and baseline differ where they must not: nothing timed")


def _debate(llm: Any, mode: str, args: argparse.Namespace, num_tokens: int) -> list[Any]:
    """The steps of one debate that generated text."""
    from vllm_choreo import Choreography
    from vllm_choreo.lab.workflows.parallel_debate import parallel_debate

    empty_caches(llm)
    with Choreography(llm, mode=mode) as c:
        log = parallel_debate(
            c,
            QUESTION,
            agents=ROLES[: args.agents],
            rounds=args.rounds,
            sampling_params=forced(llm, num_tokens),
        )
    return log.decodes()


def _pass(llm: Any, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for rep in range(args.reps):
        texts = {}
        for mode in in_turn(MODES, rep + number):
            decodes = _debate(llm, mode, args, args.answer_tokens)
            texts[mode] = [step.message.token_ids for step in decodes]
            rows += [_row(number, rep, mode, step) for step in decodes]
        if texts["choreo"] != texts["baseline"]:
            raise SystemExit("the modes did not generate the same tokens: their times mean nothing")
        late = {m: median(ttfts(rows, m, number, rep)) * 1e3 for m in MODES}
        print(f"pass {number} rep {rep}: {late}", flush=True)
    return rows


def _row(number: int, rep: int, mode: str, step: Any) -> dict[str, Any]:
    message = step.message
    generated = len(message.generated_token_ids)
    return {
        "pass": number,
        "rep": rep,
        "mode": mode,
        "stage": step.stage,
        "author": step.author,
        "ttft_s": round(message.metrics.ttft, 5),
        "latency_s": round(message.metrics.latency, 5),
        "reused_tokens": message.usage.reused_tokens,
        # Without the generated tokens: what had to be encoded before the first could be sampled.
        "prefilled_tokens": message.usage.encoded_tokens - generated,
        "generated_tokens": generated,
    }


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
                _debate(llm, mode, args, min(args.answer_tokens, 128))
    finally:
        Choreography._results = results  # type: ignore[method-assign]
        llm.llm_engine.step = step
        clock.remove()
    return rows


def _in_words(steps: Sequence[tuple[int, int]]) -> str:
    return " + ".join(f"{tokens} tokens of {requests}" for tokens, requests in steps)


if __name__ == "__main__":
    sys.exit(main())
