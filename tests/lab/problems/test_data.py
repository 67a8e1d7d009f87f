# SPDX-License-Identifier: Apache-2.0
"""Question sets made from seeds: every answer is found again by brute force from the text."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from vllm_choreo.lab import problems as data
from vllm_choreo.lab.problems import Problem, facts, words
from vllm_choreo.lab.problems.grading import is_correct

SETS: dict[str, Callable[..., list[Problem]]] = {
    name: getattr(data, name)
    for name in (
        "arithmetic",
        "algebra",
        "counting",
        "word_problems",
        "trivia",
        "concept_lists",
        "key_values",
        "sentence_facts",
        "fact_pairs",
        "list_pairs",
        "reports",
        "stated_numbers",
    )
}


@pytest.mark.parametrize("name", SETS)
def test_a_seed_gives_one_set_and_a_longer_one_begins_with_it(name: str) -> None:
    make = SETS[name]
    problems = make(40, 7)
    assert make(40, 7) == problems and make(12, 7) == problems[:12]
    assert make(40, 8) != problems
    assert len({p.id for p in problems}) == len({(p.question, p.documents) for p in problems}) == 40
    assert make(0) == []
    with pytest.raises(ValueError, match="num must"):
        make(-1)


@pytest.mark.parametrize("name", SETS)
def test_each_answer_is_graded_right_and_that_of_another_problem_wrong(name: str) -> None:
    problems = SETS[name](30, 1)
    for problem, other in itertools.pairwise(problems):
        text = ", ".join(problem.answers)
        assert is_correct(problem.kind, f"It is {text}.", problem.answers)
        if not set(problem.answers) & set(other.answers):
            assert not is_correct(other.kind, f"It is {text}.", other.answers)


def ints(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"-?\d+", text)]


def answer(problem: Problem) -> int:
    (found,) = problem.answers
    return int(found)


def test_arithmetic_is_what_python_says() -> None:
    for problem in data.arithmetic(300, 2):
        text = problem.question.removeprefix("What is ").removesuffix("?")
        assert eval(text) == answer(problem)


def side(text: str, **values: int) -> int:
    """The value of one side of an equation; "3x" is a product."""
    return int(eval(re.sub(r"(\d)([a-z])", r"\1*\2", text), {}, values))


def test_algebra_is_solved_by_the_answer_and_by_nothing_else() -> None:
    for problem in data.algebra(300, 3):
        if problem.question.startswith("Solve"):
            left, right = problem.question.removeprefix("Solve for x: ")[:-1].split(" = ")
            found = [x for x in range(-40, 41) if side(left, x=x) == side(right, x=x)]
            assert found == [answer(problem)]
            continue
        match = re.fullmatch(
            r"If (.+) = (-?\d+) and (.+) = (-?\d+), what is (.+)\?", problem.question
        )
        assert match is not None
        one, first, two, second, asked = match.groups()
        solutions = {
            side(asked, x=x, y=y)
            for x in range(-15, 16)
            for y in range(-15, 16)
            if (side(one, x=x, y=y), side(two, x=x, y=y)) == (int(first), int(second))
        }
        assert solutions == {answer(problem)}


def count(question: str) -> int:
    """The answer of a counting problem, by listing what is counted."""
    numbers = ints(question)
    if "committee" in question:
        k, n = numbers
        return len(list(itertools.combinations(range(n), k)))
    if "class" in question:
        pairs = [len(list(itertools.combinations(range(n), 2))) for n in numbers[:2]]
        return pairs[0] * pairs[1]
    if "letters" in question:
        (word,) = re.findall(r"letters of ([A-Z]+)", question)
        return len(set(itertools.permutations(word)))
    if "path" in question:
        right, up = numbers[2:4]
        steps = itertools.product((0, 1), repeat=right + up)
        return sum(sum(path) == up for path in steps)
    if "digit" in question:
        length, digits = int(question.split("-digit")[0][-1]), numbers[-1]
        return len(list(itertools.permutations(range(digits), length)))
    _, top, a, b = numbers
    return sum(i % a == 0 or i % b == 0 for i in range(1, top + 1))


def test_counting_is_what_a_list_says() -> None:
    for problem in data.counting(120, 4):
        assert count(problem.question) == answer(problem), problem.question


def trains(slow: int, late: int, fast: int) -> Fraction:
    return Fraction(slow * late, fast - slow)


def sequence(first: int, step: int, terms: int, divisor: int, *_: int) -> int:
    total, term = 0, first
    for _ in range(terms):
        total, term = total + term, term + step
    return total % divisor


def path(length: int, width: int, border: int, _tile: int, price: int) -> int:
    tiles = 0
    for x in range(-border, length + border):
        for y in range(-border, width + border):
            tiles += not (0 <= x < length and 0 <= y < width)
    return tiles * price


def eggs(more_than: int, first: int, left: int, second: int, rest: int) -> int:
    counts = itertools.count(more_than + 1)
    return next(n for n in counts if (n % first, n % second) == (left, rest))


def balls(a: int, b: int, *_: int) -> int:
    draws = list(itertools.permutations([0] * a + [1] * b, 2))
    chance = Fraction(sum(one == two for one, two in draws), len(draws))
    return chance.numerator + chance.denominator


def coins(num: int, five: int, ten: int, quarter: int, cents: int, quarters: int) -> int:
    dimes = [
        d
        for d in range(num + 1)
        if five * (num - d - quarters) + ten * d + quarter * quarters == cents
    ]
    assert len(dimes) == 1
    return dimes[0]


def quadratic(_exponent: int, *numbers: int) -> Fraction:
    """By Lagrange's formula."""
    (x0, y0, x1, y1, x2, y2, at) = numbers
    points = ((x0, y0), (x1, y1), (x2, y2))
    total = Fraction(0)
    for x, y in points:
        others = [other for other, _ in points if other != x]
        weight = Fraction(y)
        for other in others:
            weight *= Fraction(at - other, x - other)
        total += weight
    return total


def ages(ago: int, times: int, together: int) -> int:
    older = [a for a in range(together) if a - ago == times * (together - a - ago)]
    assert len(older) == 1
    return older[0]


SOLVERS = {
    "freight": trains,
    "arithmetic sequence": sequence,
    "garden": path,
    "eggs": eggs,
    "bag contains": balls,
    "coins": coins,
    "quadratic": quadratic,
    "birthdays": ages,
}


def test_word_problems_are_solved_by_brute_force() -> None:
    seen = set()
    for problem in data.word_problems(160, 5):
        (name,) = (name for name in SOLVERS if name in problem.question)
        seen.add(name)
        assert SOLVERS[name](*ints(problem.question)) == answer(problem), problem.question
    assert seen == set(SOLVERS)


def test_word_problems_are_as_long_as_those_of_math(embedded_model_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_model_path / "tokenizer.json"))
    for problem in data.word_problems(200, 6):
        assert 60 <= len(tokenizer.encode(problem.question).ids) <= 200, problem.question


def test_facts_are_asked_once_and_none_more_than_there_are() -> None:
    all_facts = facts._facts()
    assert len({question for question, _ in all_facts}) == len(all_facts) >= 60
    assert {p.question for p in data.trivia(len(all_facts))} == {q for q, _ in all_facts}
    with pytest.raises(ValueError, match=f"there are {len(all_facts)} facts"):
        data.trivia(len(all_facts) + 1)


def test_concept_lists_hold_different_words_of_both_kinds() -> None:
    assert len(set(words.NOUNS)) == len(words.NOUNS) and not set(words.NOUNS) & set(words.VERBS)
    assert len(set(words.VERBS)) == len(words.VERBS)
    for problem in data.concept_lists(20, 2):
        concepts = set(problem.answers)
        assert len(concepts) == 30 and concepts & set(words.NOUNS) and concepts & set(words.VERBS)
        assert all(word in problem.question for word in concepts)
    with pytest.raises(ValueError, match="size must be from 1 to"):
        data.concept_lists(1, size=1000)


def test_a_set_that_is_too_small_says_so() -> None:
    with pytest.raises(ValueError, match="size must be from 1 to 9, not 10"):
        data.list_pairs(1, size=10)
    with pytest.raises(ValueError, match="num_documents must be from 2 to 16, not 1"):
        data.fact_pairs(1, num_documents=1)
    with pytest.raises(ValueError, match=r"concept_lists has hardly more than \d+ different"):
        data.concept_lists(1000, size=1)


def test_documents_give_the_answer_and_only_the_one_asked_for_does() -> None:
    for name in ("key_values", "sentence_facts"):
        for problem in SETS[name](50, 3):
            asked = problem.opening.split()[0].rstrip(":")
            (document,) = (text for text in problem.documents if asked in text)
            assert is_correct("trivia", document, problem.answers)
            others = "\n".join(text for text in problem.documents if text != document)
            assert not is_correct("trivia", others, problem.answers)
            assert asked in problem.question


def test_one_line_of_one_report_gives_the_answer() -> None:
    for problem in data.reports(50, 3):
        asked = problem.question.removeprefix("What is the number of ").removesuffix("?")
        (document,) = (text for text in problem.documents if asked in text)
        (line,) = (part for part in document.split(". ") if asked in part)
        assert line.startswith(problem.opening) and is_correct("trivia", line, problem.answers)
        others = "\n".join(text for text in problem.documents if text != document)
        assert not is_correct("trivia", others, problem.answers)
        assert sum(len(ints(text)) for text in problem.documents) == 4
    with pytest.raises(ValueError, match="num_documents must be from 1 to"):
        data.reports(1, num_documents=0)


def test_a_stated_number_is_the_answer() -> None:
    for problem in data.stated_numbers(50, 3):
        fact, question = problem.question.split(". ")
        name = fact.split("'")[0]
        assert problem.answers == (fact.split()[-1],) and question == f"What is {name}'s number?"


def test_both_facts_of_a_pair_are_needed() -> None:
    for problem in data.fact_pairs(50, 3):
        (pair,) = problem.answers
        first, second = ints(pair)
        name = problem.opening.rstrip(":")
        other = pair.split("\n")[1].split(":")[0]
        assert {f"{name}: {first}", f"{other}: {second}"} <= set(problem.documents)
        assert is_correct("trivia", f" {first}\n{other}: {second}\n\nThat is all.", problem.answers)
        assert not is_correct("trivia", f" {second}\n{other}: {first}", problem.answers)
        assert not is_correct("trivia", f" {first}", problem.answers)


def test_both_lists_are_needed() -> None:
    for problem in data.list_pairs(20, 3):
        assert is_correct("concepts", " ".join(problem.documents), problem.answers)
        assert not any(is_correct("concepts", text, problem.answers) for text in problem.documents)


def test_importing_the_data_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_choreo.lab.problems; "
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
