# SPDX-License-Identifier: Apache-2.0
"""Links of built pages that lead nowhere: MkDocs looks at those that it has written itself."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit


def broken_links(pages: Mapping[str, str], files: frozenset[str]) -> Iterator[str]:
    """Find links to pages, files or anchors that are not in the site.

    Args:
        pages: HTML by path, from the site's root.
        files: paths of all files of the site.
    """
    read = {path: _Links.of(text) for path, text in pages.items()}
    for path, page in read.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            folder = posixpath.dirname(path)
            target = posixpath.normpath(posixpath.join(folder, unquote(parts.path)))
            target = path if not parts.path else target
            is_there = target in files or f"{target}/index.html" in files or target == "."
            anchor = unquote(parts.fragment)
            has_anchor = not anchor or target not in read or anchor in read[target].ids
            if not (is_there and has_anchor):
                yield f"{path} links to {address}"


class _Links(HTMLParser):
    """Collects the anchors of a page, and the addresses that it links to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.addresses: list[str] = []

    @classmethod
    def of(cls, text: str) -> _Links:
        found = cls()
        found.feed(text)
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and given.get("href"):
            self.addresses.append(given["href"])
