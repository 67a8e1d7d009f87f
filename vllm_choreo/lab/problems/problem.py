# SPDX-License-Identifier: Apache-2.0
"""`Problem`, and how sets of them are drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "math", "trivia", "concepts", "code", "calls"]

# So many drawn questions in a row that were there already: there are hardly any others.
_MAX_REPEATS = 1000


@dataclass(frozen=True)
class Problem:
    """A question whose answer is known.

    Attributes:
        id: unique in its set.
        question: the text that is asked.
        answers: any one of them is right; of kind "concepts": what the text must contain, all of
            them. Of kinds "number" and "math" there is one; of kind "code" two, what the answer
            completes and the test that it must pass, see `vllm_choreo.lab.problems.programs`; of
            kind "calls" two, see `vllm_choreo.lab.problems.function_calls.share_met`.
        kind: how an answer is compared, see `vllm_choreo.lab.problems.grading.is_correct`.
        documents: texts that the question is about, each a message of its own; mostly none.
        opening: how the answer begins, for models too small to find the form by themselves; it is
            given to the model, and is no part of what is graded.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    kind: Kind
    documents: tuple[str, ...] = ()
    opening: str = ""


def draw_distinct(
    name: str, num: int, seed: int, draw: Callable[[random.Random, str], Problem]
) -> list[Problem]:
    """`num` problems of which no two ask the same; a longer set begins with the shorter one.

    Args:
        name: name of the set; ids are `name/seed/number`.
        num: how many, at least 0.
        seed: the same name and seed give the same problems, everywhere.
        draw: makes one problem from a generator of random numbers and an id.

    Raises:
        ValueError: `num` is below 0, or there are not so many different questions.
    """
    if num < 0:
        raise ValueError(f"num must be at least 0, not {num}")
    rng = random.Random(f"{name}/{seed}")
    problems: list[Problem] = []
    asked: set[tuple[str, tuple[str, ...]]] = set()
    repeats = 0
    while len(problems) < num:
        problem = draw(rng, f"{name}/{seed}/{len(problems)}")
        key = (problem.question, problem.documents)
        if key not in asked:
            asked.add(key)
            problems.append(problem)
            repeats = 0
        elif (repeats := repeats + 1) == _MAX_REPEATS:
            raise ValueError(
                f"{name} has hardly more than {len(asked)} different questions; ask for fewer "
                f"than {num}"
            )
    return problems
