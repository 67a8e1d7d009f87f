# SPDX-License-Identifier: Apache-2.0
"""The page of the workflows: what was decided on one engine, and the check in processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_interval

# The sides on one engine.
SIDES = ("choreo", "repaired", "baseline")
# The CSV files: sides on one engine, and each in a process of its own.
DECIDED, CHECK = "workflows", "workflows_processes"
FULL_ANSWER_TOKENS = 400
# Ratio of mean times to first token at least; ratio end to end more than the paper's Table 5.
BARS = {
    "tree of thoughts": (7.0, 1.031),
    "iterative debate": (4.0, 1.036),
    "parallel debate": (12.4, 1.027),
}
# With the first 32 tokens of every parent repaired: of mean times to first token, at least.
REPAIRED_BARS = {"tree of thoughts": 7.0, "iterative debate": 7.0, "parallel debate": 20.0}
MODEL = (
    "Cost model: calls in parallel reach their first tokens after one step over all tokens that "
    "they have to encode (choreographed: with the last token of each answer before), at the times "
    "of the table below; end to end, the rest of a run, its decoding, takes as long on both sides "
    "(calls that read the same messages together decode faster than that)."
)
Rows = Sequence[Mapping[str, Any]]


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    decided, check = read_csv(DECIDED), read_csv(CHECK)
    if not decided and not check:
        return ""
    parts = ["## Workflows: time to first token and end to end"]
    if decided:
        parts += _decided(decided)
    if check:
        parts += _checked(check)
    return "\n\n".join(parts)


def _decided(rows: Rows) -> list[str]:
    num_passes = len({row["pass"] for row in rows})
    how = (
        "The baseline is vLLM's automatic prefix caching, on the same engine in the same process. "
        "Each question's answers were generated once in the baseline; then the modes took turns "
        "to replay them, who is first changing from run to run, every token forced to be the "
        f"same. Ratio: baseline / choreographed, median over questions and passes ({num_passes}) "
        "and 95% bootstrap interval."
    )
    every: list[Any] = [None]
    return [
        f"{_tasks_in_words(rows)} {how}",
        _bars_in_words(0),
        _ttft_table(rows, every, "baseline"),
        _bars_in_words(1),
        _whole_table(rows, every, "baseline"),
        f"Bars: {_verdict(rows)}. {MODEL}",
        *_repaired(rows),
        _step_table(read_csv(f"{DECIDED}_steps")),
        machine_line(rows),
    ]


def _repaired(rows: Rows) -> list[str]:
    """What repair leaves of the time to first token."""
    if not _of(rows, side="repaired"):
        return []
    lines = []
    for workflow, bar in REPAIRED_BARS.items():
        ratios = _ratios(rows, workflow, None, "ttft_mean_s", ("baseline", "repaired"))
        text, plain, repaired = (
            median(_values(rows, "prefilled_tokens", workflow, side))
            for side in ("baseline", "choreo", "repaired")
        )
        times = (
            median(_values(rows, "ttft_mean_s", workflow, side)) for side in ("choreo", "repaired")
        )
        expected = (
            median(_values(rows, "expected_ttft_mean_s", workflow, side))
            for side in ("baseline", "repaired")
        )
        lines.append(
            (
                workflow,
                *(f"{1e3 * seconds:.0f} ms" for seconds in times),
                f"{repaired - plain:.0f}",
                with_interval(ratios, ".1f"),
                bar,
                f"{text / repaired:.1f}",
                f"{next(expected) / next(expected):.1f}",
            )
        )
    head = ("workflow", "choreographed", "repaired", "more tokens in a run", "baseline / repaired")
    return [
        "Time to first token with the first 32 tokens of every parent encoded anew for its reader "
        '(`repair="first:32"`), one copy for readers with the same context. Bars count for full '
        "lengths. *By tokens*: how many times as many the baseline encodes before calls generate; "
        "where a step takes as long as it has tokens, no rule of so many can do better.",
        table((*head, "bar", "by tokens", "cost model"), lines),
    ]


def _checked(rows: Rows) -> list[str]:
    numbers = list(dict.fromkeys(row["pass"] for row in rows))
    how = (
        "Stock vLLM with automatic prefix caching, in a process that loads no code of the plugin, "
        "at the better of two block sizes for each figure: 32, and vLLM's own. Each question's "
        "answers were generated once without choreography; then the sides took turns to replay "
        "them, every token forced to be the same. Processes on one machine differ by a tenth "
        "either way, with and without the plugin alike: this checks the baseline, and decides "
        "nothing end to end. Ratio: stock / choreographed, median over the questions and 95% "
        "bootstrap interval."
    )
    return [
        "### The same against stock vLLM in processes of their own",
        f"{_tasks_in_words(rows)} {how}",
        *_baseline_check(rows, numbers),
        _bars_in_words(0),
        _ttft_table(rows, numbers, "stock"),
        _bars_in_words(1),
        _whole_table(rows, numbers, "stock"),
        MODEL,
        _step_table(read_csv(f"{CHECK}_steps")),
        machine_line(rows),
    ]


def _baseline_check(rows: Rows, numbers: Sequence[Any]) -> list[str]:
    """The baseline on the engine with the plugin beside stock vLLM at the same block size."""
    if not _of(rows, side="baseline"):
        return []
    sides = ("baseline", "stock, 32")
    lines = [
        (
            workflow,
            number,
            *(
                f"{median(_ratios(rows, workflow, number, figure, sides)):.3f}"
                for figure in ("ttft_mean_s", "seconds")
            ),
        )
        for workflow in BARS
        for number in numbers
    ]
    head = ("baseline with plugin / stock", "pass", "first token", "end to end")
    return ["The baseline on the engine with the plugin must be stock vLLM: 1.", table(head, lines)]


def _tasks_in_words(rows: Rows) -> str:
    calls = ", ".join(f"{w} {_of(rows, workflow=w)[0]['calls']}" for w in BARS)
    return (
        "The workflows of Table 5 of *Prompt Choreography* with identical voters, on "
        f"{len({row['question'] for row in rows})} mathematical questions; the longest answers "
        f"have {rows[0]['longest_answer']} tokens. Calls that generate: {calls}."
    )


def _bars_in_words(which: int) -> str:
    bars = ", ".join(f"{workflow} {found[which]}" for workflow, found in BARS.items())
    if which == 0:
        return (
            "Time to first token: mean over the calls of a run that generate, and, as a second "
            "ratio, median over them. The ratio of means is the one to compare with the paper. "
            f"Bars: {bars} (paper: 3.5, 2.0, 6.2)."
        )
    return f"End to end. Bars, the paper's ratios: more than {bars}."


def _verdict(rows: Rows) -> str:
    if not is_full(rows):
        return f"they are for answers of {FULL_ANSWER_TOKENS} tokens and do not count here"
    return "reached" if bars_reached(rows) else "MISSED"


def is_full(rows: Rows) -> bool:
    """Whether the answers are as long as the paper's."""
    return int(rows[0]["longest_answer"]) >= FULL_ANSWER_TOKENS


def bars_reached(rows: Rows) -> bool:
    """Whether every workflow met both bars, on one engine."""
    return all(
        median(_ratios(rows, workflow, None, "ttft_mean_s")) >= ttft_bar
        and median(_ratios(rows, workflow, None, "seconds")) > whole_bar
        for workflow, (ttft_bar, whole_bar) in BARS.items()
    )


# -- figures -------------------------------------------------------------------------------------


def _of(rows: Rows, **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _values(rows: Rows, figure: str, workflow: str, side: str, number: Any = None) -> list[float]:
    """Of all runs of a side, or of one pass; questions and passes in order."""
    found = _of(rows, workflow=workflow, side=side)
    return [float(row[figure]) for row in found if number in (None, row["pass"])]


def _rival(rows: Rows, workflow: str, figure: str, kind: str) -> str:
    """The side whose name begins with `kind` that is faster by this figure."""
    sides = [s for s in dict.fromkeys(row["side"] for row in rows) if s.startswith(kind)]
    return min(sides, key=lambda side: median(_values(rows, figure, workflow, side)))


def _ratios(
    rows: Rows,
    workflow: str,
    number: Any,
    figure: str,
    sides: tuple[str, str] = ("baseline", "choreo"),
) -> list[float]:
    """One side / another, run by run."""
    theirs, ours = (_values(rows, figure, workflow, side, number) for side in sides)
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def _medians(
    rows: Rows, workflow: str, number: Any, figure: str, rival: str
) -> tuple[float, float]:
    """Of the rival and of choreography."""
    theirs, ours = (_values(rows, figure, workflow, s, number) for s in (rival, "choreo"))
    return median(theirs), median(ours)


def _ttft_table(rows: Rows, numbers: Sequence[Any], kind: str) -> str:
    lines = []
    for workflow in BARS:
        rival = _rival(rows, workflow, "ttft_mean_s", kind)
        sides = (rival, "choreo")
        for number in numbers:
            times = _medians(rows, workflow, number, "ttft_mean_s", rival)
            expected = _medians(rows, workflow, number, "expected_ttft_mean_s", rival)
            lines.append(
                (
                    workflow,
                    number or "all",
                    *(f"{1e3 * seconds:.0f} ms" for seconds in times),
                    with_interval(_ratios(rows, workflow, number, "ttft_mean_s", sides), ".1f"),
                    with_interval(_ratios(rows, workflow, number, "ttft_median_s", sides), ".1f"),
                    f"{expected[0] / expected[1]:.1f}",
                )
            )
    head = ("workflow", "pass", kind, "choreographed")
    return table((*head, "ratio of means", "ratio of medians", "cost model"), lines)


def _whole_table(rows: Rows, numbers: Sequence[Any], kind: str) -> str:
    lines = []
    for workflow in BARS:
        rival = _rival(rows, workflow, "seconds", kind)
        for number in numbers:
            times = _medians(rows, workflow, number, "seconds", rival)
            between = _medians(rows, workflow, number, "decode_step_s", rival)
            prefill = _medians(rows, workflow, number, "expected_prefill_s", rival)
            ratios = _ratios(rows, workflow, number, "seconds", (rival, "choreo"))
            lines.append(
                (
                    workflow,
                    number or "all",
                    *(f"{seconds:.1f} s" for seconds in times),
                    with_interval(ratios, ".3f"),
                    f"{times[0] / (times[0] - prefill[0] + prefill[1]):.3f}",
                    *(f"{1e3 * seconds:.1f} ms" for seconds in between),
                )
            )
    head = ("workflow", "pass", kind, "choreographed", "ratio", "cost model")
    return table((*head, f"between tokens: {kind}", "choreographed"), lines)


def _step_table(steps: Rows) -> str:
    """Seconds to first token on every side, by the length of a header without parents."""
    sides = {row["side"]: row["block_size"] for row in steps}
    lines = [
        (length, *(f"{1e3 * _step(steps, side, length):.1f}" for side in sides))
        for length in dict.fromkeys(row["header_tokens"] for row in steps)
    ]
    head = [f"{side} ({size}), ms" for side, size in sides.items()]
    return table(("tokens in one step", *head), lines)


def _step(steps: Rows, side: str, length: Any) -> float:
    found = _of(steps, side=side, header_tokens=length)
    return median(float(row["ttft_s"]) for row in found)
