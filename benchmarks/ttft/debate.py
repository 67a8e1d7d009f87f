# SPDX-License-Identifier: Apache-2.0
"""A parallel debate, choreographed and as text, on one engine; the modes take turns."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness.engine import empty_caches, forced
from benchmarks.harness.probes import QUESTION, ROLES
from benchmarks.harness.stats import median
from benchmarks.harness.turns import in_turn
from benchmarks.ttft.bars import MODES, ttfts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is debated, and how often."""
    parser.add_argument("--reps", type=int, default=3, help="debates per mode and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--agents", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=128)


def run_debate(llm: Any, mode: str, args: argparse.Namespace, num_tokens: int) -> list[Any]:
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


def debates(llm: Any, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A pass: rows of its calls. Raises SystemExit: the modes have other tokens."""
    rows = []
    for rep in range(args.reps):
        texts = {}
        for mode in in_turn(MODES, rep + number):
            decodes = run_debate(llm, mode, args, args.answer_tokens)
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
