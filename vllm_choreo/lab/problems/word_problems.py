# SPDX-License-Identifier: Apache-2.0
"""Word problems of the length and kind of MATH's (Hendrycks et al., 2021), made from seeds."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from vllm_choreo.lab.problems.generate import Exercise, numbered
from vllm_choreo.lab.problems.problem import Problem
from vllm_choreo.lab.problems.words import NAMES

_COLOURS = ("red", "blue", "green", "white", "black", "yellow")


def word_problems(num: int, seed: int = 0) -> list[Problem]:
    """Problems of 60 to 200 tokens each whose answers are integers; kind "number"."""
    draws = [_trains, _sequence, _path, _remainders, _balls, _coins, _quadratic, _ages]
    return numbered("word_problems", num, seed, draws)


def _trains(rng: random.Random) -> Exercise:
    step, ratio, late = rng.randint(8, 20), rng.randint(2, 6), rng.randint(1, 4)
    slow = step * ratio
    return (
        f"A freight train leaves a station and travels along a straight track at a constant speed "
        f"of {slow} kilometers per hour. Exactly {late} hours later, an express train leaves the "
        f"same station on a parallel track and travels in the same direction at a constant speed "
        f"of {slow + step} kilometers per hour. How many hours after its own departure does the "
        f"express train catch up with the freight train?",
        ratio * late,
    )


def _sequence(rng: random.Random) -> Exercise:
    first, step, terms = rng.randint(2, 30), rng.randint(2, 15), rng.randint(10, 40)
    divisor = rng.randint(7, 29)
    total = terms * (2 * first + (terms - 1) * step) // 2
    return (
        f"In an arithmetic sequence the first term is {first}, and every later term is {step} "
        f"more than the term before it. Let $S$ be the sum of the first {terms} terms of this "
        f"sequence. When $S$ is divided by {divisor}, the quotient is an integer and a remainder "
        f"is left that is at least 0 and smaller than {divisor}. What is this remainder?",
        total % divisor,
    )


def _path(rng: random.Random) -> Exercise:
    length, width = rng.randint(8, 40), rng.randint(5, 30)
    border, price = rng.randint(1, 4), rng.randint(2, 9)
    area = (length + 2 * border) * (width + 2 * border) - length * width
    return (
        f"A rectangular garden is {length} meters long and {width} meters wide. A path that is "
        f"{border} meters wide everywhere is built all the way around the outside of the garden, "
        f"so that the garden and the path together form a larger rectangle. The path is covered "
        f"with square tiles whose sides are 1 meter long. If every tile costs {price} dollars, "
        f"how many dollars do all the tiles of the path cost together?",
        price * area,
    )


def _remainders(rng: random.Random) -> Exercise:
    first, second = rng.choice([(5, 7), (5, 8), (7, 9), (8, 11), (9, 10), (6, 11), (7, 12)])
    left_first, left_second = rng.randrange(1, first), rng.randrange(1, second)
    more_than = rng.randint(40, 400)
    answer = more_than + 1
    while answer % first != left_first or answer % second != left_second:
        answer += 1
    return (
        f"{rng.choice(NAMES)} has a basket with more than {more_than} eggs. If the eggs are put "
        f"into boxes that hold {first} eggs each, as many boxes as possible are filled and "
        f"{left_first} eggs remain. If they are put into boxes that hold {second} eggs each "
        f"instead, as many boxes as possible are filled and {left_second} eggs remain. What is "
        f"the smallest possible number of eggs in the basket?",
        answer,
    )


def _balls(rng: random.Random) -> Exercise:
    one, other = rng.sample(_COLOURS, 2)
    a, b = rng.randint(3, 12), rng.randint(3, 12)
    chance = Fraction(math.comb(a, 2) + math.comb(b, 2), math.comb(a + b, 2))
    return (
        f"A bag contains {a} {one} balls and {b} {other} balls, and nothing else. Two balls are "
        f"drawn from the bag at random, one after the other, and the first ball is not put back. "
        f"The probability that both balls have the same color can be written as $\\frac{{m}}{{n}}$"
        f", where $m$ and $n$ are positive integers that have no common divisor greater than 1. "
        f"What is $m + n$?",
        chance.numerator + chance.denominator,
    )


def _coins(rng: random.Random) -> Exercise:
    nickels, dimes, quarters = (rng.randint(2, 20) for _ in range(3))
    cents = 5 * nickels + 10 * dimes + 25 * quarters
    return (
        f"{rng.choice(NAMES)} keeps {nickels + dimes + quarters} coins in a jar. Every coin is a "
        f"nickel worth 5 cents, a dime worth 10 cents, or a quarter worth 25 cents, and all the "
        f"coins in the jar together are worth {cents} cents. There are exactly {quarters} quarters "
        f"in the jar. How many of the coins in the jar are dimes?",
        dimes,
    )


def _quadratic(rng: random.Random) -> Exercise:
    a, b, c = rng.randint(1, 5), rng.randint(-9, 9), rng.randint(-20, 20)
    at = rng.randint(4, 9)

    def value(x: int) -> int:
        return a * x * x + b * x + c

    return (
        f"Let $f(x) = ax^2 + bx + c$ be a quadratic function whose coefficients $a$, $b$ and $c$ "
        f"are real numbers. The graph of $f$ in the coordinate plane passes through the three "
        f"points $(1, {value(1)})$, $(2, {value(2)})$ and $(3, {value(3)})$. What is the value of "
        f"$f({at})$?",
        value(at),
    )


def _ages(rng: random.Random) -> Exercise:
    older, younger = rng.sample(NAMES, 2)
    ago, times, then = rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 12)
    first, second = times * then + ago, then + ago
    return (
        f"{older} and {younger} celebrate their birthdays on the same day of the year. On their "
        f"birthday exactly {ago} years ago, {older} was {times} times as old as {younger} was on "
        f"that day. On their birthday today, the sum of their two ages, counted in whole years, is "
        f"{first + second}. How old is {older} today?",
        first,
    )
