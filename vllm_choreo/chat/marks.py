# SPDX-License-Identifier: Apache-2.0
"""Text that a model's chat template writes around the contents of a chat.

A template is a program over a whole conversation: it may drop, trim, join or reorder what it is
given. So the chat is rendered a second time, with a mark in place of each content, and what stands
between the marks, the *glue*, is looked for in the chat as it was rendered:

    rendered     <|im_start|>system⏎ Be brief. <|im_end|>⏎<|im_start|>user⏎ What is green? <|im_…
    with marks   <|im_start|>system⏎ MARK <|im_end|>⏎<|im_start|>user⏎ MARK <|im_end|>⏎…
                 '----- glue ------'      '------------ glue ------------'

Where that does not fit, because the template renders a content otherwise than its mark, nothing is
found from there on, and the rest of the chat is text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARK = "CHOREOMARK{}END"
# A GIF of one pixel.
_BLANK = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
_MARKS = re.compile(_MARK.format(r"(\d+)"))


def mark(number: int) -> str:
    """Mark of a number, which stands for a content."""
    return _MARK.format(number)


def glues(rendered_marks: str) -> tuple[list[str], list[int]]:
    """Texts before, between and after the marks, and the numbers of the marks, as they stand."""
    pieces = _MARKS.split(rendered_marks)
    return pieces[::2], [int(number[:9]) for number in pieces[1::2]]


@dataclass(frozen=True)
class Content:
    """A text that a chat message holds.

    Attributes:
        message: index of its message.
        role: role of the message.
        text: the text as it was given; the template may trim or cut it.
    """

    message: int
    role: str
    text: str


@dataclass(frozen=True)
class ContentPlace:
    """Place of a content in a rendered chat: its characters `start … stop-1`."""

    content: Content
    start: int
    stop: int


def marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Content]]:
    """Chat with a mark in place of each content, and the contents by the numbers of their marks.

    Args:
        messages: messages in the form of the OpenAI API; a content is text, or a list with texts
            (`{"type": "text", "text": …}`). Empty ones and all else stay as they are.
    """
    contents: list[Content] = []

    def marked_content(index: int, role: str, text: str) -> str:
        contents.append(Content(index, role, text))
        return mark(len(contents) - 1)

    copies = []
    for index, message in enumerate(messages):
        copy, role, content = dict(message), str(message.get("role", "")), message.get("content")
        if isinstance(content, str) and content:
            copy["content"] = marked_content(index, role, content)
        elif isinstance(content, Sequence) and not isinstance(content, str):
            copy["content"] = [
                {**item, "text": marked_content(index, role, item["text"])}
                if _is_text(item)
                else item
                for item in content
            ]
        copies.append(copy)
    return copies, contents


def with_blank_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat with a blank picture in place of each: a template sees none, and it need not be loaded.

    Args:
        messages: messages in the form of the OpenAI API.
    """
    copies = []
    for message in messages:
        copy, content = dict(message), message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            copy["content"] = [
                {"type": "image_url", "image_url": {"url": _BLANK}} if _is_picture(item) else item
                for item in content
            ]
        copies.append(copy)
    return copies


def _is_picture(item: object) -> bool:
    return isinstance(item, Mapping) and item.get("type") == "image_url"


def _is_text(item: object) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("text"), str) and bool(item["text"])


def places(rendered: str, rendered_marks: str, contents: Sequence[Content]) -> list[ContentPlace]:
    """Places of the contents in the rendered chat, in the order in which they stand there.

    Args:
        rendered: the chat.
        rendered_marks: the same with marks.
        contents: the contents, by the numbers of the marks.

    Returns:
        The places up to the first content that is rendered otherwise than its mark: none, if that
        is what comes before all of them.
    """
    around, numbers = glues(rendered_marks)
    if not rendered.startswith(around[0]):
        return []
    found: list[ContentPlace] = []
    start = len(around[0])
    for place, (number, glue) in enumerate(zip(numbers, around[1:], strict=True)):
        if number >= len(contents):
            break
        is_last = place == len(numbers) - 1
        stop = _end(rendered, start, contents[number].text, glue, is_last)
        if stop is None:
            break
        found.append(ContentPlace(contents[number], start, stop))
        start = stop + len(glue)
    return found


def _end(rendered: str, start: int, text: str, glue: str, is_last: bool) -> int | None:
    """End of the content that starts at `start`; None: the glue behind it is nowhere."""
    # What templates make of a content, the commonest first.
    for form in (text, text.strip(), text.lstrip(), text.rstrip()):
        stop = start + len(form)
        is_whole = not is_last or stop + len(glue) == len(rendered)
        if is_whole and rendered.startswith(form, start) and rendered.startswith(glue, stop):
            return stop
    if is_last:
        stop = len(rendered) - len(glue)
        return stop if stop >= start and rendered.endswith(glue) else None
    stop = rendered.find(glue, start) if glue else -1
    return stop if stop >= 0 else None
