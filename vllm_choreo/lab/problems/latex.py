# SPDX-License-Identifier: Apache-2.0
"""Answers in LaTeX: the last box of a solution, and a normal form in which to compare them."""

from __future__ import annotations

import re
from fractions import Fraction

from vllm_choreo.lab.problems.numbers import number

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_TEXT = r"\\(?:text|mbox|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}"
_SPACES = re.compile(r"\\[!,;: ]|\\q?quad|~|\\left|\\right|\\displaystyle")
_DEGREES = re.compile(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree|°")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}")
_BARE_FRACTION = re.compile(r"(?<![\w}])(\d+)/(\d+)(?![\w{])")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces; None if there is none.

    `\boxed 5` without braces boxes what follows up to the next space or dollar sign. A box that is
    never closed (the text was cut) does not count.
    """
    for match in reversed(list(_BOX.finditer(text))):
        rest = text[match.end() :]
        if not rest.startswith("{"):
            return re.split(r"[\s$]", rest, maxsplit=1)[0]
        end = _closing(rest)
        if end is not None:
            return rest[1:end]
    return None


def math_equal(left: str, right: str) -> bool:
    r"""Return whether two answers are the same: in normal form, as numbers, or part for part.

    Tuples and intervals are compared entry by entry. Nothing is computed beyond fractions of
    numbers: `\frac{2}{4}` is 0.5, but `\sqrt{4}` is not 2.
    """
    a, b = normalized_math(left), normalized_math(right)
    if a == b:
        return bool(a)
    first, second = _value(a), _value(b)
    if first is not None or second is not None:
        return first == second
    parts, others = _entries(a), _entries(b)
    if len(parts) != len(others) or len(parts) < 2 or (a[0], a[-1]) != (b[0], b[-1]):
        return False
    return all(math_equal(part, other) for part, other in zip(parts, others, strict=True))


def normalized_math(text: str) -> str:
    r"""A normal form of an answer in light LaTeX.

    Dropped: spaces, dollar and percent signs, degrees, `\left` and `\right`, units at the end, the
    final period, a letter and "=" at the beginning. Then `\dfrac12` and `1/2` are `\frac{1}{2}`,
    `\sqrt3` is `\sqrt{3}`, `x^{2}` is `x^2`, `\text{Dana}` is `Dana`, `(C)` is `C`.
    """
    text = text.strip().replace("−", "-").replace("\\$", "").replace("\\%", "")
    text = _DEGREES.sub("", text.replace("$", "").replace("%", ""))
    text = _SPACES.sub(" ", text).strip().rstrip(".").strip()
    text = _without_units(text)
    text = re.sub(_TEXT, r"\1", text).strip().rstrip(".")
    text = re.sub(r"^[A-Za-z]\w?(?:\([A-Za-z]\))?\s*=\s*", "", text)
    text = re.sub(r"\s+", "", re.sub(r"\\([dt]?)frac", r"\\frac", text))
    text = _braced_arguments(text)
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)


def _without_units(text: str) -> str:
    r"""Remove words after a number or formula: `12\text{ cm}^2`, `12 square units`."""
    before = r"(?<=[\d})])"
    text = re.sub(rf"{before}\s*{_TEXT}(?:\^\{{?\d\}}?)?$", "", text)
    return re.sub(rf"{before}\s+[A-Za-z]{{2,}}(?:\s[A-Za-z]+)*(?:\^\{{?\d\}}?)?$", "", text)


def _braced_arguments(text: str) -> str:
    r"""Put braces around every argument of `\frac12`, `\frac1{23}` and `\sqrt3`."""
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    return re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", text)


def _value(text: str) -> Fraction | None:
    """The number that a normal form is, or None."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return number(text)
    above, below = number(match[2]), number(match[3])
    if above is None or not below:
        return None
    return -above / below if match[1] else above / below


def _entries(text: str) -> list[str]:
    """The entries of a tuple, interval or list; one if it is none."""
    inner = text[1:-1] if text[:1] in "([" and text[-1:] in ")]" and len(text) > 2 else text
    entries, depth = [""], 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += char
    return entries


def _closing(text: str) -> int | None:
    """The index of the brace that closes the first one; escaped braces are text."""
    depth = 0
    for index, char in enumerate(text):
        if char in "{}" and text[index - 1 : index] != "\\":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return index
    return None
