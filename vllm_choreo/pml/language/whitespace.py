# SPDX-License-Identifier: Apache-2.0
"""The rule of white space in markup, so that it can be indented.

Text is what stands between two tags. Of a text that is not white space alone:

- white space at its beginning that holds a line break is dropped; without one it is one space;
- white space at its end that holds a line break is one line break; without one it is one space;
- the indentation that all its lines share is dropped; else white space inside stays as it is.

White space alone is dropped if it holds a line break; without one it is one space. At the edges of
a turn, of a schema and of a prompt white space is dropped, and so is white space alone between what
a prompt takes. Inside an element with `xml:space="preserve"` all of it is kept.
"""

from __future__ import annotations

XML_SPACE = " \t\r\n"


def normalised(text: str, *, is_first: bool, is_last: bool) -> str:
    """Text between two tags, by the rule.

    Args:
        is_first, is_last: whether it lies at an edge where white space is dropped.
    """
    body = text.strip(XML_SPACE)
    if not body:
        return "" if is_first or is_last or "\n" in text or not text else " "
    start = len(text) - len(text.lstrip(XML_SPACE))
    before, after = text[:start], text[start + len(body) :]
    body = _unindented(body, before)
    leading = "" if is_first or "\n" in before or not before else " "
    trailing = "" if is_last or not after else "\n" if "\n" in after else " "
    return leading + body + trailing


def _unindented(body: str, before: str) -> str:
    """Body without the indentation that its lines share.

    `before` is the white space before it, which holds the first line's if that begins a line.
    """
    first, *others = body.split("\n")
    indents = [
        line[: len(line) - len(line.lstrip(" \t"))] for line in others if line.strip(XML_SPACE)
    ]
    own = before.rpartition("\n")[2] if "\n" in before else None
    shared = _common([*indents, own] if own is not None else indents)
    kept = (own or "")[len(shared) :]
    lines = [line[len(shared) :] if line.strip(XML_SPACE) else "" for line in others]
    return "\n".join([kept + first, *lines])


def _common(indents: list[str]) -> str:
    """Longest beginning that all have: that of the first and the last in their order."""
    if not indents:
        return ""
    first, last = min(indents), max(indents)
    differ = (at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])
    return first[: next(differ, len(first))]
