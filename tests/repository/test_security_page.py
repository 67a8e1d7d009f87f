# SPDX-License-Identifier: Apache-2.0
"""Every test that SECURITY.md names is there, and every promise names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISED = PAGE.partition("## What is promised")[2].partition("## What is not promised")[0]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROMISED)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_is_there(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M)


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PROMISED.splitlines() if line.startswith("|")]
    promises = [row for row in rows if not re.match(r"\| promise|\|-", row)]
    assert len(promises) > 15
    assert all(re.search(r"\| `tests/[\w/]+\.py::\w+`", row) for row in promises)


def test_the_readme_and_the_page_for_operators_link_it() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(../SECURITY.md)" in (ROOT / "docs/operating.md").read_text(encoding="utf-8")
