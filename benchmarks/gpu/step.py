# SPDX-License-Identifier: Apache-2.0
"""Workflows on a whole transformer: choreographed, against encoding again with a prefix cache."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import median, spread
from benchmarks.gpu import chain
from benchmarks.gpu.cases import Heads
from benchmarks.gpu.clients import Choreographed, Client, ReEncoded
from benchmarks.gpu.engine import BLOCK_SIZE, Engine
from benchmarks.gpu.measure import Clock, Floors, measure_floors
from benchmarks.gpu.model import Model, Shape
from benchmarks.gpu.report import Bar, Report, Sheet
from vllm_choreo.data import algebra
from vllm_choreo.workflows.iterative_debate import iterative_debate
from vllm_choreo.workflows.parallel_debate import parallel_debate
from vllm_choreo.workflows.tree_of_thoughts import tree_of_thoughts

TINY = Shape(2, 128, Heads(4, 2, 32), 128, 256)
ADVICE = "\n\nReason step by step, and put the final answer in \\boxed{}."
# Ratios of mean times to first token: those of Table 5 of "Prompt Choreography".
BARS = {"tree of thoughts": 3.5, "iterative debate": 2.0, "parallel debate": 6.2}
OURS = "choreographed"
SIDES: dict[str, Callable[[Engine, int], Client]] = {
    OURS: functools.partial(Choreographed, mode="choreo"),
    "encoded again, SDPA": functools.partial(ReEncoded, mode="baseline", is_gathered=True),
    "encoded again, our kernel": functools.partial(ReEncoded, mode="baseline"),
}
COLUMNS = (
    "workflow", "side", "repetition", "calls", "ttft_mean_ms", "ttft_median_ms",
    "expected_ttft_mean_ms", "decode_step_ms", "estimated_seconds", "encoded_tokens",
    "encoded_for_first_tokens", "generated_tokens",
)  # fmt: skip
ROUND_COLUMNS = (
    "workflow", "side", "repetition", "round", "calls", "encoded", "ttft_ms",
    "expected_ttft_ms", "tokens", "decode_step_ms",
)  # fmt: skip

# A row of the sheet.
Run = dict[str, Any]


def run(report: Report, args: argparse.Namespace) -> None:
    """Prove that a chain of messages is plain text, then time the workflows."""
    is_tiny = args.shapes == "tiny"
    shape = TINY if is_tiny else Shape()
    if not chain.check(report, shape):
        return
    shape = dataclasses.replace(shape, num_layers=args.layers or shape.num_layers)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    num_blocks = 200 if is_tiny else 3000
    model = Model(
        shape, dtype=dtype, device=report.device, max_position=8192,
        num_slots=num_blocks * BLOCK_SIZE, use_graphs=report.device.type == "cuda",
    )  # fmt: skip
    engine = Engine(model, num_blocks)
    floors = measure_floors(Clock(report.device), args.repeats)
    report.say(f"{shape.num_weights() / 1e9:.2f} billion weights, {shape.num_layers} layers")
    sheet, rounds = report.sheet("step", COLUMNS), report.sheet("step_rounds", ROUND_COLUMNS)
    for name, workflow in _workflows(is_tiny).items():
        runs: list[Run] = []
        for number in range(args.workflow_repeats + 1):
            found = _in_turn(
                engine, name, workflow, number, _CostModel(shape, dtype, floors), rounds
            )
            if number == 0:  # compiles
                continue
            runs += found
            for row in found:
                sheet.add(row)
        _tell(report, name, runs)


def _workflows(is_tiny: bool) -> dict[str, Callable[[Any], Any]]:
    """With answers as long as those of the paper, or a few tokens."""
    question = algebra(1)[0].question + ("" if is_tiny else ADVICE)
    long, short = ({"max_tokens": n} for n in ((6, 4) if is_tiny else (400, 100)))
    sizes = (2, 2, 1, 2, 2) if is_tiny else (8, 4, 3, 3, 3)
    candidates, voters, turns, agents, rounds = sizes
    return {
        "tree of thoughts": lambda c: tree_of_thoughts(
            c, question, candidates=candidates, voters=voters,
            sampling_params=long, vote_params=short,
        ),
        "iterative debate": lambda c: iterative_debate(
            c, question, rounds=turns, sampling_params=long, verdict_params=short
        ),
        "parallel debate": lambda c: parallel_debate(
            c, question, agents=agents, rounds=rounds, sampling_params=long
        ),
    }  # fmt: skip


def _in_turn(
    engine: Engine,
    name: str,
    workflow: Callable[[Any], Any],
    number: int,
    model: _CostModel,
    rounds: Sheet,
) -> list[Run]:
    """A workflow on every side; who is first changes from repetition to repetition."""
    is_tiny = engine.model.shape.hidden_size == TINY.hidden_size
    found = []
    outputs = []
    for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
        engine.reset()
        client = SIDES[side](engine, 1 if is_tiny else 8)
        transcript = workflow(client)
        outputs.append([step.message.token_ids for step in transcript.steps])
        found.append({"workflow": name, "side": side, "repetition": number, **model.row(client)})
        if number > 0:
            for i, row in enumerate(model.rounds(client)):
                rounds.add(
                    {**row, "workflow": name, "side": side, "repetition": number, "round": i}
                )
    assert all(output == outputs[0] for output in outputs), "the sides did not say the same"
    return found


class _CostModel:
    """A step takes as long as reading all weights, or as its matrix products, if that is longer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, floors: Floors) -> None:
        self._weights, self._itemsize, self._floors = shape.num_weights(), dtype.itemsize, floors

    def seconds(self, num_tokens: int) -> float:
        """Of a step; neither attention nor the head are counted."""
        return self._floors.seconds(
            self._weights * self._itemsize, 2.0 * self._weights * num_tokens
        )

    def row(self, client: Client) -> Mapping[str, Any]:
        """The figures of one run."""
        rounds = client.rounds
        ttfts = [r.ttft for r in rounds for _ in range(r.calls)]
        expected = [self.seconds(r.encoded) for r in rounds for _ in range(r.calls)]
        steps = sum(r.tokens - 1 for r in rounds)
        decoding = sum((r.tokens - 1) * r.decode_step for r in rounds)
        first = sum(r.encoded for r in rounds)
        return {
            "calls": len(ttfts),
            "ttft_mean_ms": 1e3 * statistics.mean(ttfts),
            "ttft_median_ms": 1e3 * median(ttfts),
            "expected_ttft_mean_ms": 1e3 * statistics.mean(expected),
            "decode_step_ms": 1e3 * decoding / steps,
            "estimated_seconds": client.prefill_seconds + sum(r.ttft for r in rounds) + decoding,
            "encoded_tokens": first + client.prefilled,
            "encoded_for_first_tokens": first,
            "generated_tokens": sum(r.calls * r.tokens for r in rounds),
        }

    def rounds(self, client: Client) -> list[Run]:
        return [
            {
                "calls": r.calls, "encoded": r.encoded, "ttft_ms": 1e3 * r.ttft,
                "expected_ttft_ms": 1e3 * self.seconds(r.encoded), "tokens": r.tokens,
                "decode_step_ms": 1e3 * r.decode_step,
            }
            for r in client.rounds
        ]  # fmt: skip


def _tell(report: Report, name: str, runs: Sequence[Run]) -> None:
    """Lines of a workflow, and its bar: against the faster way of encoding again."""

    def values(side: str, figure: str) -> list[float]:
        return [row[figure] for row in runs if row["side"] == side]

    for side in SIDES:
        low, high = spread(values(side, "ttft_mean_ms"))
        report.note(
            f"{name}, {side}: mean time to first token {median(values(side, 'ttft_mean_ms')):.2f} "
            f"[{low:.2f}, {high:.2f}] ms over {runs[0]['calls']} calls, cost model "
            f"{values(side, 'expected_ttft_mean_ms')[0]:.2f} ms for "
            f"{values(side, 'encoded_for_first_tokens')[0]} tokens encoded; a decode step "
            f"{median(values(side, 'decode_step_ms')):.2f} ms; in all, estimated from these, "
            f"{median(values(side, 'estimated_seconds')):.2f} s"
        )
    rivals = [side for side in SIDES if side != OURS]
    rival = min(rivals, key=lambda side: median(values(side, "ttft_mean_ms")))
    pairs = zip(values(rival, "ttft_mean_ms"), values(OURS, "ttft_mean_ms"), strict=True)
    expected = [values(side, "expected_ttft_mean_ms")[0] for side in (rival, OURS)]
    ratio = median(theirs / ours for theirs, ours in pairs)
    model = f"cost model {expected[0] / expected[1]:.1f}"
    report.bar(Bar(f"{name}: time to first token, {rival} / ours ({model})", ratio, BARS[name]))
