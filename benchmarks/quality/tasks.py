# SPDX-License-Identifier: Apache-2.0
"""Tasks that the small model can do, and the ways in which documents reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_choreo.lab.problems import (
    Problem,
    fact_pairs,
    key_values,
    list_pairs,
    sentence_facts,
)
from vllm_choreo.lab.problems.grading import coverage, is_correct

# How documents reached the reader, as the rows of the CSV files name it.
BASELINE = "baseline"
EXACT = "exact"
CHOREO = "choreo"
ALONE = "choreo, each document alone"
NO_DOCUMENTS = "baseline without documents"
WITHOUT_NOTE = "choreo, documents without the note"


class Task(NamedTuple):
    """One task.

    `max_tokens`: of an answer; none has room to name everything that was read, unless it is asked
    for. `guess`: the score of one who read the documents and picks at random; None: of no meaning.
    """

    name: str
    make: Callable[[int, int], list[Problem]]
    max_tokens: int
    guess: float | None


TASKS = (
    Task("key-value look-up, 4 documents", key_values, 8, 1 / 4),
    Task("facts in sentences, 4 documents", sentence_facts, 8, 1 / 4),
    Task("two facts of 3 documents", fact_pairs, 20, 1 / 6),
    Task("merge two lists (coverage)", list_pairs, 60, None),
)


class Way(NamedTuple):
    """How documents reach the reader.

    `context`: what each is encoded with in mode "choreo": "instruction", "nothing", or "note": the
    instruction and a message that the reader does not read; or there are "no documents".
    """

    name: str
    mode: str
    context: str


WAYS = (
    Way(BASELINE, BASELINE, "instruction"),
    Way(EXACT, EXACT, "instruction"),
    Way(CHOREO, CHOREO, "instruction"),
    Way(ALONE, CHOREO, "nothing"),
    Way(NO_DOCUMENTS, BASELINE, "no documents"),
)
MODES = (BASELINE, EXACT, CHOREO)


def score(problem: Problem, text: str) -> float:
    """1 or 0; of a list, the fraction of it that the text holds."""
    if problem.kind == "concepts":
        return coverage(text, problem.answers)
    return float(is_correct(problem.kind, text, problem.answers))
