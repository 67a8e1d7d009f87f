# SPDX-License-Identifier: Apache-2.0
"""Documents in which the one line that matters stands among others, made from seeds."""

from __future__ import annotations

import random

from vllm_choreo.lab.problems.problem import Problem, draw_distinct

_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Henry", "Irene", "James",
    "Karin", "Louis", "Maria", "Nathan", "Olga", "Peter", "Quentin", "Rosa", "Simon", "Tina",
    "Ursula", "Victor", "Wendy", "Xavier", "Yvonne", "Zora",
)  # fmt: skip
# Nothing in them is a number or a name.
_LINES = (
    "The office opens early in the morning and closes late in the evening.",
    "Visitors are asked to wait in the hall until someone calls them.",
    "The windows on the north side were cleaned last week.",
    "A new printer stands next to the door of the library.",
    "Lunch is served in the garden when the weather is good.",
    "The meeting about the new building was moved to another day.",
    "Please keep the corridor free of boxes and bicycles.",
    "The heating will be checked before the winter begins.",
    "All letters are collected once a day in the main hall.",
    "The trees behind the house were planted many years ago.",
    "Coffee and tea can be found in the small kitchen.",
    "The lift is slow, so most people take the stairs.",
    "Lost keys should be brought to the front desk.",
    "The old maps are kept in a cupboard on the upper floor.",
    "A gardener comes by to look after the roses.",
    "The car park behind the station is often full.",
)


def reports(num: int, seed: int = 0, num_documents: int = 4) -> list[Problem]:
    """Documents of about 70 tokens, each with the number of one person; one of them is asked for.

    Kind "trivia".

    Raises:
        ValueError: no documents, or more than there are names.
    """
    if not 1 <= num_documents <= len(_NAMES):
        raise ValueError(f"num_documents must be from 1 to {len(_NAMES)}, not {num_documents}")

    def draw(rng: random.Random, problem_id: str) -> Problem:
        names = rng.sample(_NAMES, num_documents)
        values = [str(value) for value in rng.sample(range(1000, 10_000), num_documents)]
        asked = rng.randrange(num_documents)
        return Problem(
            problem_id,
            f"What is the number of {names[asked]}?",
            (values[asked],),
            "trivia",
            tuple(_report(rng, *each) for each in zip(names, values, strict=True)),
            f"{names[asked]}:",
        )

    return draw_distinct("reports", num, seed, draw)


def _report(rng: random.Random, name: str, value: str) -> str:
    lines = rng.sample(_LINES, 5)
    lines.insert(rng.randint(1, 4), f"{name}: {value}.")
    return " ".join(lines)
