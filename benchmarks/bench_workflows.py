# SPDX-License-Identifier: Apache-2.0
"""Workflows against vLLM's prefix caching: time to first token, and end to end.

    python -m benchmarks.bench_workflows [--questions 2] [--passes 2] [--answer-tokens 64]
    python -m benchmarks.bench_workflows --full [--questions 3]

Tree of thoughts (identical voters), iterative debate and parallel debate on mathematical questions.
Each question's answers are generated once by stock vLLM, then replayed, token by token, on every
side in turn: see `sides`. `--full` has answers as long as those of the paper's Table 5; the bars
count there alone, for what a call saves grows with what it need not encode again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    command_line,
    machine,
    machine_line,
    median,
    read_csv,
    set_environment,
    table,
    write_csv,
)
from benchmarks.sides import SIDES, WORKFLOWS, Side, open_sides, replay_in_turn
from benchmarks.stats import bootstrap_interval
from vllm_choreo.workflows.record.transcript import Step, Transcript

FULL_ANSWER_TOKENS = 400
KV_CACHE_GIB = 3
MAX_MODEL_LEN = 8192
# Ratio of mean times to first token at least; ratio end to end more than the paper's Table 5.
BARS = {
    "tree of thoughts": (7.0, 1.031),
    "iterative debate": (4.0, 1.036),
    "parallel debate": (12.4, 1.027),
}
HEAD = ("workflow", "pass", "stock", "choreographed")
ADVICE = "\n\nReason step by step, and put the final answer in \\boxed{}."


def main() -> int:
    args = _arguments()
    set_environment(KV_CACHE_GIB)
    tasks: list[tuple[str, Path]] = []
    runs: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.passes + 1):
            with open_sides(["choreo", *args.stock], KV_CACHE_GIB, MAX_MODEL_LEN) as sides:
                tasks = tasks or _record(sides[1], Path(folder), args)
                for side in sides:  # what is done once only shall not be timed
                    side.replay(tasks[0][1])
                found = _steps(sides, number)
                steps += found
                runs += _pass(sides, tasks, number, CostModel(found))
    record = {**machine(), "command": command_line("bench_workflows")}
    write_csv("workflows", runs, **record)
    write_csv("workflows_steps", steps, **record)
    print(section())
    return int(_are_full(runs) and not bars_reached(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="lengths as in the paper; an hour")
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--verdict-tokens", type=int, default=16, help="votes and moderator")
    stock = [side for side in SIDES if side != "choreo"]
    parser.add_argument("--stock", nargs="+", choices=stock, default=stock)
    if "--full" in sys.argv:
        parser.set_defaults(questions=3, answer_tokens=FULL_ANSWER_TOKENS, verdict_tokens=100)
    return parser.parse_args()


def _record(side: Side, folder: Path, args: argparse.Namespace) -> list[tuple[str, Path]]:
    """Transcripts of every workflow on every question: (id of the question, file)."""
    from vllm_choreo.workflows.problems import algebra, counting

    count = (args.questions + 1) // 2
    pairs = zip(algebra(count), counting(count), strict=True)
    problems = [problem for pair in pairs for problem in pair][: args.questions]
    verdicts = {"tree_of_thoughts": "vote_params", "iterative_debate": "verdict_params"}
    tasks = []
    for problem in problems:
        for workflow in WORKFLOWS:
            path = folder / f"{len(tasks)}.json"
            lengths = {"sampling_params": args.answer_tokens}
            if workflow in verdicts:
                lengths[verdicts[workflow]] = args.verdict_tokens
            inputs = {"question": problem.question + ADVICE}
            side.ask("record", workflow=workflow, inputs=inputs, lengths=lengths, path=str(path))
            tasks.append((problem.id, path))
            print(f"recorded {workflow} on {problem.id}", flush=True)
    return tasks


def _steps(sides: Sequence[Side], number: int) -> list[dict[str, Any]]:
    """What a step takes on each side, by its tokens."""
    return [
        {"side": side.name, "block_size": side.ask("block_size"), **row, "pass": number}
        for side in sides
        for row in side.ask("steps", repeats=3)
    ]


def _pass(
    sides: Sequence[Side], tasks: Sequence[tuple[str, Path]], number: int, model: CostModel
) -> list[dict[str, Any]]:
    rows = []
    for turn, (question, path) in enumerate(tasks):
        runs = replay_in_turn(sides, path, turn + number)
        rows += [_row(number, question, side, run, model) for side, run in runs.items()]
        seconds = {side: round(run.seconds, 2) for side, run in runs.items()}
        print(f"pass {number} {question} {runs['choreo'].workflow}: {seconds}", flush=True)
    return rows


def _row(
    number: int, question: str, side: str, run: Transcript, model: CostModel
) -> dict[str, Any]:
    ttfts = [step.message.metrics.ttft for step in run.decodes()]
    expected = model.first_tokens(run)
    return {
        "pass": number,
        "question": question,
        "workflow": run.title,
        "side": side,
        "seconds": round(run.seconds, 4),
        "calls": len(ttfts),
        "ttft_mean_s": round(statistics.mean(ttfts), 5),
        "ttft_median_s": round(statistics.median(ttfts), 5),
        "decode_step_s": round(_decode_step_seconds(run), 6),
        "expected_ttft_mean_s": round(statistics.mean(expected), 5),
        "expected_prefill_s": round(model.prefill_seconds(run), 5),
        # Without the generated tokens: what had to be encoded before a token could be sampled.
        "prefilled_tokens": sum(map(_num_prefilled, run.steps)),
        "generated_tokens": sum(len(s.message.generated_token_ids) for s in run.steps),
        "longest_answer": max(len(s.message.generated_token_ids) for s in run.steps),
    }


def _decode_step_seconds(run: Transcript) -> float:
    """Mean seconds between the tokens of a call, over all calls."""
    messages = [step.message for step in run.decodes()]
    seconds = sum(m.metrics.latency - m.metrics.ttft for m in messages)
    return seconds / sum(len(m.generated_token_ids) - 1 for m in messages)


def _num_prefilled(step: Step) -> int:
    """Tokens that a call encoded before it generated any; 0 for a prefill of the baseline."""
    return max(0, step.message.usage.encoded_tokens - len(step.message.generated_token_ids))


# -- the cost model ------------------------------------------------------------------------------


class CostModel:
    """What calls should take that run in parallel: one step over all tokens that they prefill.

    Args:
        steps: measured seconds to first token by the length of a header, with nothing to reuse.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]]) -> None:
        times: dict[int, list[float]] = {}
        for step in steps:
            times.setdefault(int(step["header_tokens"]), []).append(float(step["ttft_s"]))
        self._points = [(length, median(times[length])) for length in sorted(times)]

    def step_seconds(self, num_tokens: int) -> float:
        """Of 1 token or more: between the lengths in proportion, beyond at the last one's rate."""
        longest, seconds = self._points[-1]
        if num_tokens >= longest:
            return seconds * num_tokens / longest
        n1, t1 = next(point for point in self._points if point[0] > num_tokens)
        n0, t0 = max(point for point in self._points if point[0] <= num_tokens)
        return t0 + (t1 - t0) * (num_tokens - n0) / (n1 - n0)

    def first_tokens(self, run: Transcript) -> list[float]:
        """Expected seconds to first token of every call that generates."""
        return [
            seconds
            for steps, seconds in self._batches(run)
            for step in steps
            if step.message.generated_token_ids
        ]

    def prefill_seconds(self, run: Transcript) -> float:
        """Expected seconds of all prefilling of a run."""
        return sum(seconds for _, seconds in self._batches(run))

    def _batches(self, run: Transcript) -> list[tuple[list[Step], float]]:
        """The calls that were submitted together, and how long they should prefill."""
        batches: dict[float, list[Step]] = {}
        for step in run.steps:
            batches.setdefault(step.message.metrics.submitted, []).append(step)
        unread = set()
        found = []
        for steps in batches.values():
            num_tokens = sum(map(_num_prefilled, steps))
            if run.mode == "choreo":
                # The last token of an answer is run when the answer is first read.
                num_tokens += len(unread)
                unread = {s.message.id for s in steps if s.message.generated_token_ids}
            found.append((steps, self.step_seconds(num_tokens) if num_tokens else 0.0))
        return found


# -- the page ------------------------------------------------------------------------------------


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    rows = read_csv("workflows")
    if not rows:
        return ""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    ttft = [_ttft_line(rows, w, n) for w in BARS for n in passes]
    whole = [_whole_line(rows, w, n) for w in BARS for n in passes]
    verdict = "reached" if bars_reached(rows) else "MISSED"
    if not _are_full(rows):
        verdict = f"they are for answers of {FULL_ANSWER_TOKENS} tokens and do not count here"
    calls = ", ".join(f"{w} {_of(rows, workflow=w)[0]['calls']}" for w in BARS)
    return "\n\n".join(
        [
            "## Workflows: time to first token and end to end",
            "The workflows of Table 5 of *Prompt Choreography* with identical voters, on "
            f"{len({row['question'] for row in rows})} mathematical questions; the longest answers "
            f"have {rows[0]['longest_answer']} tokens. Calls that generate: {calls}. The rival is "
            "stock vLLM with automatic prefix caching, in a process that loads no code of the "
            "plugin, at the better of two block sizes for each figure: 32, and vLLM's own. Each "
            "question's answers were generated once by stock vLLM; then the sides took turns to "
            "replay them, every token forced to be the same. Ratio: stock / choreographed, median "
            "over the questions and 95% bootstrap interval.",
            "Time to first token: mean over the calls of a run that generate, and, as a second "
            "ratio, median over them. The ratio of means is the one to compare with the paper. "
            f"Bars: {_words(0)} (paper: 3.5, 2.0, 6.2).",
            table((*HEAD, "ratio of means", "ratio of medians", "cost model"), ttft),
            f"End to end. Bars, the paper's ratios: more than {_words(1)}.",
            table((*HEAD, "ratio", "cost model", "between tokens: stock", "choreographed"), whole),
            f"Bars: {verdict}. Cost model: calls in parallel reach their first tokens after one "
            "step over all tokens that they have to encode (choreographed: with the last token of "
            "each answer before), at the times of the table below; end to end, the rest of a run, "
            "its decoding, takes as long on both sides (calls that read the same messages together "
            "decode faster than that).",
            _step_table(read_csv("workflows_steps")),
            machine_line(rows),
        ]
    )


def _are_full(rows: Sequence[Mapping[str, Any]]) -> bool:
    return int(rows[0]["longest_answer"]) >= FULL_ANSWER_TOKENS


def bars_reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every workflow met both bars in every pass."""
    return all(
        median(_ratios(rows, workflow, number, "ttft_mean_s")) >= ttft_bar
        and median(_ratios(rows, workflow, number, "seconds")) > whole_bar
        for workflow, (ttft_bar, whole_bar) in BARS.items()
        for number in dict.fromkeys(row["pass"] for row in rows)
    )


def _words(which: int) -> str:
    return ", ".join(f"{workflow} {bars[which]}" for workflow, bars in BARS.items())


def _of(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _values(rows: Sequence[Mapping[str, Any]], figure: str, **wanted: Any) -> list[float]:
    return [float(row[figure]) for row in _of(rows, **wanted)]


def _rival(rows: Sequence[Mapping[str, Any]], workflow: str, figure: str) -> str:
    """The stock side that is faster by this figure."""
    stock = [side for side in dict.fromkeys(row["side"] for row in rows) if side != "choreo"]
    return min(stock, key=lambda side: median(_values(rows, figure, workflow=workflow, side=side)))


def _ratios(
    rows: Sequence[Mapping[str, Any]], workflow: str, number: Any, figure: str
) -> list[float]:
    """Stock / choreographed, question by question."""
    rival = _rival(rows, workflow, figure)
    stock, choreo = (
        _values(rows, figure, workflow=workflow, side=side, **{"pass": number})
        for side in (rival, "choreo")
    )
    return [ours / theirs for ours, theirs in zip(stock, choreo, strict=True)]


def _with_interval(values: Sequence[float], form: str) -> str:
    low, high = bootstrap_interval(values)
    return f"{median(values):{form}} [{low:{form}}, {high:{form}}]"


def _medians(
    rows: Sequence[Mapping[str, Any]], workflow: str, number: Any, figure: str, rival: str
) -> list[float]:
    """Of the stock side and of choreography."""
    return [
        median(_values(rows, figure, workflow=workflow, side=side, **{"pass": number}))
        for side in (rival, "choreo")
    ]


def _ttft_line(rows: Sequence[Mapping[str, Any]], workflow: str, number: Any) -> tuple[Any, ...]:
    rival = _rival(rows, workflow, "ttft_mean_s")
    times = _medians(rows, workflow, number, "ttft_mean_s", rival)
    expected = _medians(rows, workflow, number, "expected_ttft_mean_s", rival)
    return (
        workflow,
        number,
        *(f"{1e3 * seconds:.0f} ms" for seconds in times),
        _with_interval(_ratios(rows, workflow, number, "ttft_mean_s"), ".1f"),
        _with_interval(_ratios(rows, workflow, number, "ttft_median_s"), ".1f"),
        f"{expected[0] / expected[1]:.1f}",
    )


def _whole_line(rows: Sequence[Mapping[str, Any]], workflow: str, number: Any) -> tuple[Any, ...]:
    rival = _rival(rows, workflow, "seconds")
    times = _medians(rows, workflow, number, "seconds", rival)
    between = _medians(rows, workflow, number, "decode_step_s", rival)
    prefill = _medians(rows, workflow, number, "expected_prefill_s", rival)
    return (
        workflow,
        number,
        *(f"{seconds:.1f} s" for seconds in times),
        _with_interval(_ratios(rows, workflow, number, "seconds"), ".3f"),
        f"{times[0] / (times[0] - prefill[0] + prefill[1]):.3f}",
        *(f"{1e3 * seconds:.1f} ms" for seconds in between),
    )


def _step_table(steps: Sequence[Mapping[str, str]]) -> str:
    """Seconds to first token on every side, by the length of a header without parents."""
    sides = {row["side"]: row["block_size"] for row in steps}
    lines = [
        (
            length,
            *(
                f"{1e3 * median(_values(steps, 'ttft_s', side=side, header_tokens=length)):.1f}"
                for side in sides
            ),
        )
        for length in dict.fromkeys(row["header_tokens"] for row in steps)
    ]
    head = [f"{side} ({size}), ms" for side, size in sides.items()]
    return table(("tokens in one step", *head), lines)


if __name__ == "__main__":
    sys.exit(main())
