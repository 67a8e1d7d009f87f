# SPDX-License-Identifier: Apache-2.0
"""Questions about short documents that no one can know without reading them, made from seeds.

Every document is meant as a message of its own. The forms are those on which a model of 135 million
parameters is far better than chance when it reads the documents as one text.
"""

from __future__ import annotations

import random

from vllm_choreo.lab.problems.problem import Problem, draw_distinct
from vllm_choreo.lab.problems.words import NAMES

_JOBS = (
    "baker", "teacher", "doctor", "painter", "farmer", "pilot", "nurse", "lawyer", "singer",
    "driver", "gardener", "cook",
)  # fmt: skip
_CITIES = (
    "Rome", "Oslo", "Paris", "Berlin", "Madrid", "Lisbon", "Vienna", "Athens", "Dublin", "Cairo",
    "Tokyo", "Lima",
)  # fmt: skip
_PETS = (
    "cat", "dog", "horse", "parrot", "rabbit", "goat", "snake", "turtle", "hamster", "fish",
    "canary", "pony",
)  # fmt: skip
_FOODS = (
    "apples", "bread", "milk", "eggs", "butter", "cheese", "rice", "honey", "onions", "carrots",
    "sugar", "tea", "coffee", "salt", "beans", "soup", "oranges", "lemons",
)  # fmt: skip


def key_values(num: int, seed: int = 0, num_documents: int = 4) -> list[Problem]:
    """Documents of a name and its number each; one number is asked for. Kind "trivia".

    Raises:
        ValueError: no documents, or more than there are names.
    """
    _check("num_documents", num_documents, 1, len(NAMES))

    def draw(rng: random.Random, problem_id: str) -> Problem:
        names, values = _numbered(rng, num_documents)
        asked = rng.randrange(num_documents)
        return Problem(
            problem_id,
            f"What is the number of {names[asked]}?",
            (values[asked],),
            "trivia",
            tuple(f"{name}: {value}" for name, value in zip(names, values, strict=True)),
            f"{names[asked]}:",
        )

    return draw_distinct("key_values", num, seed, draw)


def stated_numbers(num: int, seed: int = 0) -> list[Problem]:
    """Questions that hold their own answer. Kind "trivia".

    For workflows that answer several of them, or whose agents read each other's answers.
    """

    def draw(rng: random.Random, problem_id: str) -> Problem:
        (name,), (value,) = _numbered(rng, 1)
        question = f"{name}'s number is {value}. What is {name}'s number?"
        return Problem(problem_id, question, (value,), "trivia")

    return draw_distinct("stated_numbers", num, seed, draw)


def sentence_facts(num: int, seed: int = 0, num_documents: int = 4) -> list[Problem]:
    """Documents that say three things of a person each; one job is asked for. Kind "trivia".

    Raises:
        ValueError: no documents, or more than there are jobs.
    """
    _check("num_documents", num_documents, 1, len(_JOBS))

    def draw(rng: random.Random, problem_id: str) -> Problem:
        names = rng.sample(NAMES, num_documents)
        jobs = rng.sample(_JOBS, num_documents)
        documents = [
            f"About {name}: {name} is a {job} from {rng.choice(_CITIES)}. {name} has a "
            f"{rng.choice(_PETS)} at home."
            for name, job in zip(names, jobs, strict=True)
        ]
        asked = rng.randrange(num_documents)
        return Problem(
            problem_id,
            f"What is {names[asked]}'s job?",
            (jobs[asked],),
            "trivia",
            tuple(documents),
            f"{names[asked]} is a",
        )

    return draw_distinct("sentence_facts", num, seed, draw)


def fact_pairs(num: int, seed: int = 0, num_documents: int = 3) -> list[Problem]:
    """Documents of `key_values`; two numbers are asked for, each after its name. Kind "trivia".

    Raises:
        ValueError: fewer than two documents, or more than there are names.
    """
    _check("num_documents", num_documents, 2, len(NAMES))

    def draw(rng: random.Random, problem_id: str) -> Problem:
        names, values = _numbered(rng, num_documents)
        one, two = rng.sample(range(num_documents), 2)
        return Problem(
            problem_id,
            f"What are the numbers of {names[one]} and {names[two]}?",
            (f"{values[one]}\n{names[two]}: {values[two]}",),
            "trivia",
            tuple(f"{name}: {value}" for name, value in zip(names, values, strict=True)),
            f"{names[one]}:",
        )

    return draw_distinct("fact_pairs", num, seed, draw)


def list_pairs(num: int, seed: int = 0, size: int = 4) -> list[Problem]:
    """Two lists of `size` things in two documents, to be merged. Kind "concepts": the things.

    Raises:
        ValueError: no things, or more than there are.
    """
    _check("size", size, 1, len(_FOODS) // 2)

    def draw(rng: random.Random, problem_id: str) -> Problem:
        foods = rng.sample(_FOODS, 2 * size)
        return Problem(
            problem_id,
            "Write all items of list 1, then all items of list 2.",
            tuple(foods),
            "concepts",
            (f"List 1: {', '.join(foods[:size])}", f"List 2: {', '.join(foods[size:])}"),
            "All items:",
        )

    return draw_distinct("list_pairs", num, seed, draw)


def _numbered(rng: random.Random, num: int) -> tuple[list[str], list[str]]:
    """Different names, and a number of four digits for each, no two alike."""
    return rng.sample(NAMES, num), [str(value) for value in rng.sample(range(1000, 10_000), num)]


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")
