# SPDX-License-Identifier: Apache-2.0
"""Comparison of a text with the right answer, as is usual for the set that it comes from.

| kind | compared |
|---|---|
| number | the number in the last box, after "####", or the last one of the text (GSM8K) |
| math | the last box or its stand-ins, as LaTeX in a normal form, or as numbers (MATH) |
| trivia | any accepted answer stands in the text, as whole words in a normal form (TriviaQA) |
| concepts | every concept occurs in the text, inflected or not (CommonGen) |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

from vllm_choreo.lab.problems.function_calls import share_met
from vllm_choreo.lab.problems.inflections import inflections
from vllm_choreo.lab.problems.latex import last_boxed, math_equal
from vllm_choreo.lab.problems.numbers import numbers
from vllm_choreo.lab.problems.problem import Kind
from vllm_choreo.lab.problems.programs import passes

_MARK = "####"
_STATED = re.compile(r"\banswer\s*(?:is|=|:)\s*:?\s*(.+?)(?:\.(?=\s|$)|\n|$)", re.IGNORECASE)
_INLINE = re.compile(r"\$([^$]+)\$")
_ARTICLES = frozenset(("a", "an", "the"))


def is_correct(kind: Kind, text: str, answers: Sequence[str]) -> bool:
    """Return whether `text`, a whole answer with its reasoning, is right.

    Args:
        kind: kind of the problem.
        text: generated text.
        answers: answers of the problem; of kind "concepts" the concepts, all of which must occur;
            of kind "code" what `text` completes, and the test, which is run: see `programs.passes`;
            of kind "calls" the scenario and what is to be called: see `function_calls.share_met`.

    Raises:
        ChoreoError: programs may not be run, see `programs.check_code_may_run`; or functions are
            missing, see `SimulatedFunctions`.
        ValueError: no such kind.
    """
    if kind == "number":
        found = final_number(text)
        return found is not None and any(found == final_number(answer) for answer in answers)
    if kind == "math":
        # A bare answer has no marks, and may be more than its last number.
        given = (text, final_answer(text) or text)
        return any(math_equal(form, answer) for form in given for answer in answers)
    if kind == "trivia":
        return contains_any(text, answers)
    if kind == "concepts":
        return coverage(text, answers) == 1.0
    if kind == "code":
        head, test = answers
        return passes(text, head, test)
    if kind == "calls":
        scenario, wanted = answers
        return share_met(text, scenario, wanted) == 1.0
    raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {kind!r}")


def final_number(text: str) -> Fraction | None:
    """The last number in the last box, else after the last "####", else in the whole text."""
    boxed = last_boxed(text)
    for part in (boxed, _after_mark(text), text):
        if part is not None and (found := numbers(part)):
            return found[-1]
    return None


def final_answer(text: str) -> str | None:
    """The final answer of a solution, as it is written there.

    The first that there is: the last box; what follows the last "####"; what follows the last
    "answer is"; the last formula between dollar signs; the last number.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    marked = _after_mark(text)
    if marked:
        return marked
    stated = [*_STATED.finditer(text)] or [*_INLINE.finditer(text)]
    if stated:
        return stated[-1][1].strip()
    found = numbers(text)
    return str(found[-1]) if found else None


def contains_any(text: str, answers: Sequence[str]) -> bool:
    """Return whether `text` has an answer as whole words; case, articles, accents do not count.

    Articles count in an answer that has no other words. One without letters and digits must stand
    there as it is.
    """
    return any(_contains(text, answer.strip()) for answer in answers if answer.strip())


def _contains(text: str, answer: str) -> bool:
    wanted = _words(answer)
    if not wanted:
        return answer in text
    words = f" {normalized(text)} "
    if _ARTICLES.issuperset(wanted):
        words = f" {' '.join(_words(text))} "
    return f" {normalized(answer)} " in words


def normalized(text: str) -> str:
    """Lower-case words without punctuation, accents and articles, one space between them.

    A text of articles alone keeps them; one without letters and digits is empty.
    """
    words = _words(text)
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and accents."""
    # NFKD takes "é" apart; case folding then makes "ss" of "ß", and may leave new compounds.
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    letters = (
        char if char.isalnum() else " " for char in folded if not unicodedata.combining(char)
    )
    return "".join(letters).split()


def coverage(text: str, concepts: Sequence[str]) -> float:
    """The fraction of `concepts` that occur in `text` as whole words, inflected or not.

    Of a concept of several words the last one is inflected. Without concepts it is 1.
    """
    words = f" {normalized(text)} "
    found = sum(_occurs(concept, words) for concept in concepts)
    return found / len(concepts) if concepts else 1.0


def _occurs(concept: str, words: str) -> bool:
    *first, last = normalized(concept).split() or [""]
    forms = (" ".join([*first, form]) for form in inflections(last))
    return bool(last) and any(f" {form} " in words for form in forms)


def _after_mark(text: str) -> str | None:
    """The rest of the line after the last "####"."""
    _, mark, rest = text.rpartition(_MARK)
    return rest.strip().split("\n")[0].strip() if mark else None
