# SPDX-License-Identifier: Apache-2.0
"""Short exercises made from seeds: arithmetic, algebra, counting. All answers are integers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from vllm_choreo.lab.problems.problem import Problem, draw_distinct

# A question and its answer.
Exercise = tuple[str, int]
Draw = Callable[[random.Random], Exercise]


def arithmetic(num: int, seed: int = 0) -> list[Problem]:
    """Expressions of two or three operations, as "What is 17 + 4 * 23?"."""
    return numbered("arithmetic", num, seed, [_expression])


def algebra(num: int, seed: int = 0) -> list[Problem]:
    """Linear equations with one unknown, and systems of two with two unknowns."""
    return numbered("algebra", num, seed, [_one_side, _both_sides, _system])


def counting(num: int, seed: int = 0) -> list[Problem]:
    """Small combinatorics: choices, arrangements, paths, digits, multiples."""
    draws = [_committee, _two_groups, _arrangements, _paths, _digit_strings, _multiples]
    return numbered("counting", num, seed, draws)


def numbered(name: str, num: int, seed: int, draws: Sequence[Draw]) -> list[Problem]:
    """A set of kind "number" whose exercises come from all of `draws`."""

    def draw(rng: random.Random, problem_id: str) -> Problem:
        question, answer = rng.choice(draws)(rng)
        return Problem(problem_id, question, (str(answer),), "number")

    return draw_distinct(name, num, seed, draw)


# -- arithmetic ----------------------------------------------------------------------------------


def _expression(rng: random.Random) -> Exercise:
    a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 12)
    forms = [
        (f"{a} + {b} * {c}", a + b * c),
        (f"({a} + {b}) * {c}", (a + b) * c),
        (f"{a} * {c} - {b}", a * c - b),
        (f"{a * c} / {c} + {b}", a + b),
        (f"{a} - {b} + {c}", a - b + c),
        (f"({a} - {c}) * {c} + {b}", (a - c) * c + b),
    ]
    text, value = rng.choice(forms)
    return f"What is {text}?", value


# -- algebra -------------------------------------------------------------------------------------


def _one_side(rng: random.Random) -> Exercise:
    x, a, b = _unknown(rng), rng.randint(2, 12), _signed(rng, 1, 30)
    return f"Solve for x: {_sum((a, 'x'), (b, ''))} = {a * x + b}.", x


def _both_sides(rng: random.Random) -> Exercise:
    x, b = _unknown(rng), _signed(rng, 1, 30)
    a, c = rng.sample(range(2, 13), 2)
    left, right = _sum((a, "x"), (b, "")), _sum((c, "x"), ((a - c) * x + b, ""))
    return f"Solve for x: {left} = {right}.", x


def _system(rng: random.Random) -> Exercise:
    x, y = _unknown(rng), _unknown(rng)
    while True:
        a, b, c, d = (_signed(rng, 1, 7) for _ in range(4))
        if a * d != b * c:  # one solution
            break
    first = f"{_sum((a, 'x'), (b, 'y'))} = {a * x + b * y}"
    second = f"{_sum((c, 'x'), (d, 'y'))} = {c * x + d * y}"
    asked, value = rng.choice([("x", x), ("y", y), ("x + y", x + y)])
    return f"If {first} and {second}, what is {asked}?", value


def _unknown(rng: random.Random) -> int:
    return _signed(rng, 1, 15)


def _signed(rng: random.Random, low: int, high: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(low, high)


def _sum(*terms: tuple[int, str]) -> str:
    """Terms as one writes them: no 1 before a letter, no "+ -"; those of 0 are left out."""
    text = ""
    for number, letter in terms:
        if number == 0:
            continue
        size = "" if abs(number) == 1 and letter else str(abs(number))
        sign = "-" if number < 0 else "+"
        if text:
            text += f" {sign} {size}{letter}"
        else:
            text = ("-" if number < 0 else "") + size + letter
    return text


# -- counting ------------------------------------------------------------------------------------


def _committee(rng: random.Random) -> Exercise:
    n, k = rng.randint(5, 20), rng.randint(2, 4)
    return f"In how many ways can {k} of {n} people be chosen for a committee?", math.comb(n, k)


def _two_groups(rng: random.Random) -> Exercise:
    girls, boys = rng.randint(3, 8), rng.randint(3, 8)
    return (
        f"A class has {girls} girls and {boys} boys. In how many ways can 2 girls and 2 boys be "
        "chosen?",
        math.comb(girls, 2) * math.comb(boys, 2),
    )


_WORDS = (
    "APPLE", "BALLOON", "BANANA", "BOOK", "CACTUS", "COFFEE", "DADDY", "EGG", "ERROR", "GRASS",
    "HAPPY", "KITTEN", "LEVEL", "MAMMAL", "MIRROR", "PEPPER", "PUPPY", "RABBIT", "SEVEN", "TREE",
)  # fmt: skip


def _arrangements(rng: random.Random) -> Exercise:
    word = rng.choice(_WORDS)
    ways = math.factorial(len(word))
    for letter in set(word):
        ways //= math.factorial(word.count(letter))
    return f"In how many different orders can the letters of {word} be written?", ways


def _paths(rng: random.Random) -> Exercise:
    right, up = rng.randint(2, 8), rng.randint(2, 8)
    return (
        f"A path from (0, 0) to ({right}, {up}) takes steps of length 1, each to the right or up. "
        "How many such paths are there?",
        math.comb(right + up, up),
    )


def _digit_strings(rng: random.Random) -> Exercise:
    length, digits = rng.randint(2, 4), rng.randint(4, 9)
    return (
        f"How many {length}-digit numbers can be written with the digits 1 to {digits} if no "
        "digit is used twice?",
        math.perm(digits, length),
    )


def _multiples(rng: random.Random) -> Exercise:
    top = rng.randint(50, 400)
    a, b = rng.sample((2, 3, 5, 7, 11), 2)
    return (
        f"How many of the integers from 1 to {top} are multiples of {a} or of {b}?",
        top // a + top // b - top // (a * b),
    )
