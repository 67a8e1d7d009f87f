# SPDX-License-Identifier: Apache-2.0
"""What a built page makes a browser fetch from other hosts, and what it shows as it was written."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_LOADING = {"src", "srcset", "data", "poster"}
_LINKED = {"stylesheet", "preload", "preconnect", "modulepreload", "icon", "dns-prefetch"}
_ELSEWHERE = re.compile(r"(https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:@import\s*|url\()[\s'\"]*((?:https?:)?//[^)'\"\s]+)", re.IGNORECASE)


def loaded_from_elsewhere(page: str) -> list[str]:
    """Find the addresses on other hosts that a page loads; links that a reader follows are none."""
    reader = _Reader(convert_charrefs=True)
    reader.feed(page)
    return reader.found


def shown_as_written(page: str) -> list[str]:
    """Find lines of tables and lists that Markdown took for text, for want of an empty line."""
    paragraphs = re.findall(r"<p>(.*?)</p>", page, re.DOTALL)
    return [
        line
        for text in paragraphs
        for line in text.splitlines()
        if re.match(r"\| |- |\d+\. ", line)
    ]


class _Reader(HTMLParser):
    """Collects addresses, of attributes and of styles inside the page."""

    def __init__(self, convert_charrefs: bool) -> None:
        super().__init__(convert_charrefs=convert_charrefs)
        self.found: list[str] = []
        self.is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.is_style = tag == "style"
        names = set(_LOADING)
        if tag == "link" and _LINKED & set(given.get("rel", "").split()):
            names.add("href")
        self.found += [given[n] for n in names & set(given) if _ELSEWHERE.match(given[n])]
        self.found += _IN_STYLE.findall(given.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self.is_style = False

    def handle_data(self, data: str) -> None:
        if self.is_style:
            self.found += _IN_STYLE.findall(data)
