# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages that tell what is. The changelog and the notes of migration name what was.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "migration.md"),
    ROOT / "patches/README.md",
    ROOT / "benchmarks/RESULTS.md",
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    """The path of a page from the root."""
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """The blocks of code of a page, each with its language, in order."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands_of(block: str) -> list[list[str]]:
    """The words of each command of a shell block, without variables that are set before it."""
    commands = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        while "&&" in words:
            at = words.index("&&")
            commands.append(words[:at])
            words = words[at + 1 :]
        if words:
            commands.append(words)
    return commands
