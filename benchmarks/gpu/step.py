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

from benchmarks.gpu import chain
from benchmarks.gpu.cases import Heads
from benchmarks.gpu.clients import Choreographed, Client, ReEncoded
from benchmarks.gpu.measure import Clock, Floors, measure_floors
from benchmarks.gpu.report import Bar, Report, Sheet
from benchmarks.gpu.toy_engine import BLOCK_SIZE, ToyEngine
from benchmarks.gpu.transformer import Model, Shape
from benchmarks.harness.stats import median
from benchmarks.harness.tables import with_spread
from vllm_choreo.lab.problems import algebra
from vllm_choreo.lab.workflows.iterative_debate import iterative_debate
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts

TINY = Shape(2, 128, Heads(4, 2, 32), 128, 256)
ADVICE = "\n\nReason step by step, and put the final answer in \\boxed{}."
# Ratios of mean times to first token: those of Table 5 of "Prompt Choreography".
BARS = {"tree of thoughts": 3.5, "iterative debate": 2.0, "parallel debate": 6.2}
OURS = "choreographed"
SIDES: dict[str, Callable[[ToyEngine, int], Client]] = {
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

HEAD = (
    "workflow", "side", "calls", "mean ms to first token", "cost model", "tokens encoded for it",
    "encoded in all", "ms per decode step", "seconds in all, estimated",
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
        num_slots=num_blocks * BLOCK_SIZE, use_graphs=not (report.is_dry or args.no_graphs),
    )  # fmt: skip
    if model.graph_failure:
        report.note(f"no CUDA graphs, the host launches every kernel: {model.graph_failure[:300]}")
    engine = ToyEngine(model, num_blocks)
    floors = measure_floors(Clock(report.device), args.repeats)
    report.say(f"{shape.num_weights() / 1e9:.2f} billion weights, {shape.num_layers} layers")
    sheet, rounds = report.sheet("step", COLUMNS), report.sheet("step_rounds", ROUND_COLUMNS)
    cost_model = _CostModel(shape, dtype, floors)
    lines: list[tuple[object, ...]] = []
    for name, workflow in paper_workflows(is_tiny).items():
        runs: list[Run] = []
        # The first run compiles; the interpreter has nothing to compile.
        for number in range(1 if report.is_dry else 0, args.workflow_repeats + 1):
            found = _in_turn(engine, name, workflow, number, cost_model, rounds)
            if number > 0:
                runs += found
                for row in found:
                    sheet.add(row)
            report.say(f"{name}, repetition {number} of {args.workflow_repeats}")
        lines += _lines(name, runs)
        report.bar(_bar(name, runs))
    report.table("Workflows, whole transformer", HEAD, lines)


def paper_workflows(is_tiny: bool) -> dict[str, Callable[[Any], Any]]:
    """The workflows of Table 5, with answers as long as those of the paper, or a few tokens."""
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
    engine: ToyEngine,
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


def _lines(name: str, runs: Sequence[Run]) -> list[tuple[object, ...]]:
    """Of the table: medians [quartiles] over the repetitions."""
    lines: list[tuple[object, ...]] = []
    for side in SIDES:
        of_side = [row for row in runs if row["side"] == side]
        times = _values(runs, side, "ttft_mean_ms")
        lines.append((
            name, side, of_side[0]["calls"], with_spread(times, ".2f"),
            f"{of_side[0]['expected_ttft_mean_ms']:.2f}", of_side[0]["encoded_for_first_tokens"],
            of_side[0]["encoded_tokens"], f"{median(_values(runs, side, 'decode_step_ms')):.2f}",
            f"{median(_values(runs, side, 'estimated_seconds')):.2f}",
        ))  # fmt: skip
    return lines


def _bar(name: str, runs: Sequence[Run]) -> Bar:
    """Against the faster way of encoding again."""
    rivals = [side for side in SIDES if side != OURS]
    rival = min(rivals, key=lambda side: median(_values(runs, side, "ttft_mean_ms")))
    sides = (rival, OURS)
    pairs = zip(*(_values(runs, side, "ttft_mean_ms") for side in sides), strict=True)
    theirs, ours = (_values(runs, side, "expected_ttft_mean_ms")[0] for side in sides)
    text = f"{name}: time to first token, {rival} / ours (cost model {theirs / ours:.1f})"
    return Bar(text, median(them / us for them, us in pairs), BARS[name])


def _values(runs: Sequence[Run], side: str, figure: str) -> list[float]:
    """Of each repetition, in order."""
    return [row[figure] for row in runs if row["side"] == side]
