# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,]\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus is a sign, not an operation, where nothing that it could be taken from stands before it.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:[$€£] ?)?(?P<size>{_DIGITS})"
    rf"(?: (?P<above>\d+)/(?P<below>0*[1-9]\d*)| ?/ ?(?P<over>0*[1-9]\d*))?(?![\d/])"
)


def numbers(text: str) -> list[Fraction]:
    """The numbers of a text in order.

    Commas between thousands, currency signs and percent signs are dropped (12% is 12, as graders of
    GSM8K and MATH have it); "3/4" and "1 1/2" are one number each.
    """
    return [_value(match) for match in _NUMBER.finditer(_plain(text))]


def number(text: str) -> Fraction | None:
    """The number that `text` is as a whole, or None if it is anything else or more."""
    plain = _plain(text).strip().removesuffix("%").rstrip()
    match = _NUMBER.fullmatch(plain)
    return None if match is None else _value(match)


def _plain(text: str) -> str:
    """Replace typographic minus signs, and LaTeX's signs and commas between thousands."""
    text = text.replace("−", "-").replace("–", "-").replace("\\$", "$").replace("\\%", "%")
    return text.replace("{,}", ",").replace(",\\!", ",")


def _value(match: re.Match[str]) -> Fraction:
    size = Fraction(match["size"].replace(",", ""))
    if match["over"]:
        size /= int(match["over"])
    elif match["below"]:
        size += Fraction(int(match["above"]), int(match["below"]))
    return -size if match["sign"] == "-" else size
