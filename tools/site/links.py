# SPDX-License-Identifier: Apache-2.0
"""Links between files of the repository, as links between pages of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

# A label may go on in the next line, not in the next paragraph.
_LINK = re.compile(r"(!?)\[((?:[^\[\]\n]|\n(?!\s*\n)|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *(```|~~~)")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")


def relink(text: str, source: str, page: str, pages: Mapping[str, str], root: Path) -> str:
    """Rewrite the links of a file for its page.

    What is no page of the site but a file of the repository is named without a link, for a reader
    of the site may not have the repository. What is nowhere is left as it is, and fails the build.

    Args:
        text: the file's Markdown.
        source: its path, from the repository's root.
        page: path of its page, from the site's root.
        pages: for the paths of files and pictures that the site has, where it has them.
        root: the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        bang, label, target = match.groups()
        if _ELSEWHERE.match(target):
            return match.group()
        path, _, anchor = target.partition("#")
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if named in pages:
            relative = posixpath.relpath(pages[named], posixpath.dirname(page) or ".")
            return f"{bang}[{label}]({relative}{'#' + anchor if anchor else ''})"
        return label if (root / named).exists() and not bang else match.group()

    parts, is_code = [""], False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            is_code = not is_code
            parts.append("")
        parts[-1] += line
    # Every other part begins with the fence of a block of code.
    return "".join(part if n % 2 else _LINK.sub(replaced, part) for n, part in enumerate(parts))
