# SPDX-License-Identifier: Apache-2.0
"""The page of quality: tables, and what the numbers say in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, spread
from benchmarks.harness.tables import table
from benchmarks.quality.agreement import REVISION_TOKENS
from vllm_choreo.judge.stats import bootstrap_interval

# How documents reached the reader, as the rows of the CSV files name it.
BASELINE = "baseline"
EXACT = "exact"
CHOREO = "choreo"
ALONE = "choreo, each document alone"
NO_DOCUMENTS = "baseline without documents"
WITHOUT_NOTE = "choreo, documents without the note"

Row = Mapping[str, str]


def section() -> str:
    """The part of RESULTS.md, from the CSV files."""
    tasks, leaks = read_csv("quality_tasks"), read_csv("quality_leakage")
    if not tasks or not leaks:
        return ""
    debates = read_csv("quality_agreement")
    parts = [
        "## Quality: what choreography costs in answers",
        "Documents are messages of their own, encoded after the instruction alone and read one "
        "after the other; greedy answers of a model of 135 million parameters to "
        f"{tasks[0]['n']} generated problems a task. Share of right answers (of the lists: of the "
        "items named) with 95% intervals, and the difference from the baseline on the same "
        "problems.",
        *_task_tables(tasks),
        "A note gives a wrong number to the name that is asked for. The documents are encoded "
        "after the note, but the reader does not list it among its parents. What the note adds is "
        "measured against a note with another number.",
        _leak_table(leaks),
        *(_agreement_part(debates) if debates else ()),
        *findings(tasks, leaks, debates),
        *dict.fromkeys(machine_line(rows) for rows in (tasks, leaks, debates) if rows),
    ]
    return "\n\n".join(parts)


def _task_tables(rows: Sequence[Row]) -> list[str]:
    head = ("task", "documents", "right, %", "minus baseline, points", "same text as baseline")
    lines = []
    for row in rows:
        same = f"{row['same_texts']} of {row['n']}"
        cells = (_interval(row, "score"), _interval(row, "difference"), same)
        lines.append((row["task"], row["way"], *cells))
    guesses = {row["task"]: float(row["guess"]) for row in rows if row["guess"]}
    chance = "; ".join(f"{task}, {share:.0%}" for task, share in guesses.items())
    return [table(head, lines), f"Chance of one who read the documents and guesses: {chance}."]


def _leak_table(rows: Sequence[Row]) -> str:
    head = (
        "way",
        "right, %",
        "minus choreo without the note, points",
        "the note's number, %",
        "what the note adds to its log-probability, nats",
    )
    lines = [
        (
            row["way"],
            *(_interval(row, name) for name in ("score", "difference", "note")),
            _nats(row) if row["gain"] else "",
        )
        for row in rows
    ]
    return table(head, lines)


def _agreement_part(rows: Sequence[Row]) -> list[str]:
    num_questions = len({row["question"] for row in rows})
    return [
        f"Next-token distributions in a debate on {num_questions} questions: one of two agents "
        "reads both answers and revises its own; the baseline's "
        f"{REVISION_TOKENS} tokens (or fewer) are forced. Full vocabulary; medians with "
        "quartiles, means with 95% intervals over the questions.",
        agreement_table(rows),
    ]


def agreement_table(rows: Sequence[Row]) -> str:
    """The table of a CSV file's rows."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        of_way = [row for row in rows if row["way"] == way]
        never = sum(row["first"] == row["tokens"] for row in of_way)
        first = [float(row["first"]) for row in of_way]
        low, high = spread(first)
        cells = [f"{median(first):.0f} [{low:.0f}, {high:.0f}]", f"{never} of {len(of_way)}"]
        cells += [_mean(of_way, "kl", ".2g"), _mean(of_way, "top1", ".3f")]
        lines.append((way, *cells))
    head = (
        "way",
        "tokens before the first that differs",
        "none differs",
        "KL per token, nats",
        "same most likely token",
    )
    return table(head, lines)


def _mean_of(rows: Sequence[Row], way: str, name: str) -> float:
    """The mean of a column over the questions."""
    return float(np.mean([float(row[name]) for row in rows if row["way"] == way]))


def _mean(rows: Sequence[Row], name: str, form: str) -> str:
    """Mean [95% interval] over the questions: the tokens of one answer are not independent."""
    values = [float(row[name]) for row in rows]
    low, high = bootstrap_interval(values, lambda found: math.fsum(found) / len(found))
    return f"{np.mean(values):{form}} [{low:{form}}, {high:{form}}]"


# -- in words ------------------------------------------------------------------------------------


def findings(tasks: Sequence[Row], leaks: Sequence[Row], debates: Sequence[Row]) -> list[str]:
    """What blockage and leakage did; each verdict follows from an interval."""
    parts = [_blockage(tasks), _exactness(tasks), _leakage(leaks)]
    return [*parts, _drift(debates)] if debates else parts


def _blockage(rows: Sequence[Row]) -> str:
    verdicts = []
    for row in _of(rows, CHOREO):
        base = next(other for other in _of(rows, BASELINE) if other["task"] == row["task"])
        change = f"{_share(base, 'score')} to {_share(row, 'score')}"
        verdicts.append(f"{row['task']}: {change}, {_verdict(row)}")
    pairs = list(zip(_of(rows, CHOREO), _of(rows, ALONE), strict=True))
    lower = sum(float(alone["score"]) < float(choreo["score"]) for choreo, alone in pairs)
    return (
        "**Blockage**: documents are encoded without seeing those before them. From baseline to "
        f"choreographed: {'; '.join(verdicts)}. When they do not see the instruction either, the "
        f"score is lower still in {lower} of {len(pairs)} tasks."
    )


def _exactness(rows: Sequence[Row]) -> str:
    exact = _of(rows, EXACT)
    same, num = (sum(int(row[name]) for row in exact) for name in ("same_texts", "n"))
    share = same / num
    reason = (
        "so what is lost above is lost by what messages did not see, not by positions or kernels"
        if share > 0.95
        else "so not all that differs above comes from what messages did not see"
    )
    return (
        "**Exact mode**, in which every document sees those before it, gives the baseline's text "
        f"in {same} of {num} answers, {reason}."
    )


def _leakage(rows: Sequence[Row]) -> str:
    without, leaked, exact = (next(iter(_of(rows, way))) for way in (WITHOUT_NOTE, CHOREO, EXACT))
    low, high = float(leaked["gain_low"]), float(leaked["gain_high"])
    if low > 0:
        trace = "its content comes through, and makes its number more likely"
    elif high < 0:
        trace = "its content comes through, but makes its number less likely"
    else:
        trace = "its content is not seen to come through"
    return (
        "**Leakage**: documents are encoded with a note that their reader does not list. The "
        f"note's number is answered in {leaked['notes']} of {leaked['n']} cases; saying it, "
        f"instead of another number, changes its log-probability by {_nats(leaked)} nats: {trace}. "
        f"In exact mode the change is {_nats(exact)}. Right answers, from documents encoded "
        f"without the note to documents encoded with it: {_share(without, 'score')} to "
        f"{_share(leaked, 'score')}, {_verdict(leaked)}."
    )


def _drift(rows: Sequence[Row]) -> str:
    exact, choreo, alone = dict.fromkeys(row["way"] for row in rows)
    kl = {way: _mean_of(rows, way, "kl") for way in (exact, choreo, alone)}
    top1 = {way: _mean_of(rows, way, "top1") for way in (exact, choreo)}
    less = "more" if kl[alone] > kl[choreo] else "less"
    return (
        f"**In the debate** the next-token distribution is {kl[choreo]:.2g} nats per token away "
        f"from the baseline's, and its most likely token is the same at {top1[choreo]:.0%} of the "
        f"tokens; in exact mode {kl[exact]:.1g} nats and {top1[exact]:.1%}. There both kinds of "
        "difference meet: the answers were encoded without each other (blockage), and the other "
        "agent's with that agent's role (leakage). With every message encoded alone, which leaks "
        f"nothing and blocks more, the distance is {less}: {kl[alone]:.2g} nats."
    )


def _of(rows: Sequence[Row], way: str) -> list[Row]:
    return [row for row in rows if row["way"] == way]


def _verdict(row: Row) -> str:
    """Of a difference: by whether its interval holds 0."""
    if float(row["difference_high"]) < 0:
        return "worse"
    if float(row["difference_low"]) > 0:
        return "better"
    return "no difference that this sample shows"


def _share(row: Row, name: str) -> str:
    return f"{float(row[name]):.0%}"


def _nats(row: Row) -> str:
    values = (float(row[key]) for key in ("gain", "gain_low", "gain_high"))
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*values)


def _interval(row: Row, name: str) -> str:
    """Percent, with the interval."""
    value, low, high = (100 * float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value:.0f} [{low:.0f}, {high:.0f}]"
