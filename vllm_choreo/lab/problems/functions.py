# SPDX-License-Identifier: Apache-2.0
"""Small functions to be written in Python, each with the test that it must pass. Kind "code"."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_choreo.lab.problems.problem import Problem, draw_distinct
from vllm_choreo.lab.problems.words import NOUNS

_NUM_CASES = 5


class _Family(NamedTuple):
    """Functions of one kind.

    `text` describes one, with {n} for a number of it; `solve(argument, n)` is what it returns.
    """

    name: str
    argument: str
    text: str
    draw: Callable[[random.Random], object]
    solve: Callable[..., object]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(3, 8))]


def _words(rng: random.Random) -> list[str]:
    return rng.sample(NOUNS, rng.randint(3, 6))


def _sentence(rng: random.Random) -> str:
    return " ".join(_words(rng))


_FAMILIES: Sequence[_Family] = (
    _Family(
        "sum_above",
        "numbers",
        "the sum of all numbers in the list that are greater than {n}",
        _numbers,
        lambda numbers, n: sum(one for one in numbers if one > n),
    ),
    _Family(
        "count_multiples",
        "numbers",
        "how many numbers in the list are multiples of {n}",
        _numbers,
        lambda numbers, n: sum(one % n == 0 for one in numbers),
    ),
    _Family(
        "scaled",
        "numbers",
        "a list of all the numbers, each multiplied by {n}",
        _numbers,
        lambda numbers, n: [one * n for one in numbers],
    ),
    _Family(
        "largest",
        "numbers",
        "the {n} largest numbers of the list, in descending order; all of them if there are fewer",
        _numbers,
        lambda numbers, n: sorted(numbers, reverse=True)[:n],
    ),
    _Family(
        "long_words",
        "words",
        "a list of the words that have more than {n} letters, in the order of the list",
        _words,
        lambda words, n: [word for word in words if len(word) > n],
    ),
    _Family(
        "beginnings",
        "words",
        "a list of the first {n} letters of each word",
        _words,
        lambda words, n: [word[:n] for word in words],
    ),
    _Family(
        "every_nth",
        "text",
        "every character of the text whose index is a multiple of {n}, as one string",
        _sentence,
        lambda text, n: text[::n],
    ),
    _Family(
        "repeated",
        "text",
        "the words of the text in reverse order, each repeated {n} times, as one string with a "
        "space between words",
        _sentence,
        lambda text, n: " ".join(word for word in text.split()[::-1] for _ in range(n)),
    ),
)


def functions(num: int, seed: int = 0) -> list[Problem]:
    """Tasks of kind "code": write a function of one argument; the test has cases of its own.

    The answers are what is to be completed, and the test: see `programs.passes`.

    Raises:
        ValueError: see `draw_distinct`.
    """

    def draw(rng: random.Random, problem_id: str) -> Problem:
        family, n = rng.choice(_FAMILIES), rng.randint(2, 9)
        shown, *cases = (family.draw(rng) for _ in range(_NUM_CASES + 1))
        head = (
            f"def {family.name}({family.argument}):\n"
            f'    """Return {family.text.format(n=n)}.\n\n'
            f"    >>> {family.name}({shown!r})\n"
            f"    {family.solve(shown, n)!r}\n"
            '    """\n'
        )
        test = "\n".join(
            f"assert {family.name}({case!r}) == {family.solve(case, n)!r}" for case in cases
        )
        return Problem(problem_id, code_question(head), (head, test), "code")

    return draw_distinct("functions", num, seed, draw)


def code_question(head: str) -> str:
    """The task of a programmer who is given the first lines of a function, from any source."""
    return f"Complete this function in Python:\n\n```python\n{head.strip()}\n```"
