# SPDX-License-Identifier: Apache-2.0
"""Files that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "patches/README.md",
]
_NAMED = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.(?:py|h|cpp))?)`")
# The first folder of a name that is one of ours: of the repository, or of the package.
_FOLDERS = {
    path.name
    for folder in (ROOT, ROOT / "vllm_choreo", ROOT / "vllm_choreo/engine")
    for path in folder.iterdir()
    if path.is_dir()
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """From the root, from the package, or from its package `engine`."""
    if page.name == "CHANGELOG.md":
        return  # names what was
    bases = (ROOT, ROOT / "vllm_choreo", ROOT / "vllm_choreo/engine")
    missing = [
        name
        for name in _NAMED.findall(page.read_text(encoding="utf-8"))
        if name.split("/")[0] in _FOLDERS and not any((base / name).exists() for base in bases)
    ]
    assert not missing
