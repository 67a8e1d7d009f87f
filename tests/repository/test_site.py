# SPDX-License-Identifier: Apache-2.0
"""What the site is made of: links, pages of families, what pages load. `make docs` builds it."""

from __future__ import annotations

import re

import pytest

from tests.repository.pages import ROOT
from tools.site.families import Family, family_page, read_families
from tools.site.followed import broken_links
from tools.site.hooks import PAGES, site_paths
from tools.site.links import relink
from tools.site.loaded import loaded_from_elsewhere, shown_as_written

FAMILIES = read_families((ROOT / "docs/models.md").read_text(encoding="utf-8"))
_SITE = {"docs/a.md": "a.md", "README.md": "index.md", "docs/b/c.md": "b/c.md"}


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("README.md", "index.md", "[x](docs/a.md#y)", "[x](a.md#y)"),
        ("README.md", "index.md", "[x\n  y](docs/a.md) z", "[x\n  y](a.md) z"),
        ("README.md", "index.md", "[x]\n\ny](docs/a.md)", "[x]\n\ny](docs/a.md)"),
        ("docs/b/c.md", "b/c.md", "[x](../../README.md)", "[x](../index.md)"),
        ("docs/a.md", "a.md", "[x](../Makefile)", "x"),
        ("docs/a.md", "a.md", "[x](../nothing.md)", "[x](../nothing.md)"),
        ("docs/a.md", "a.md", "[x](https://b.c) [y](#z)", "[x](https://b.c) [y](#z)"),
        ("README.md", "index.md", "```\n[x](docs/a.md)\n```\n", "```\n[x](docs/a.md)\n```\n"),
    ],
)
def test_links_lead_to_pages(source: str, page: str, text: str, expected: str) -> None:
    assert relink(text, source, page, _SITE, ROOT) == expected


def test_all_pages_of_the_repository_are_in_the_site() -> None:
    paths = site_paths()
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} | set(PAGES)
    assert pages <= set(paths) and len(set(paths.values())) == len(paths)
    assert all((ROOT / path).exists() for path in paths)


def test_all_pages_are_in_the_navigation() -> None:
    """MkDocs says so, too; this one needs no environment of its own."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"- {where}\n" in navigation for where in site_paths().values() if ".md" in where)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.page)
def test_a_family_has_a_page_with_what_was_run_and_refused(family: Family) -> None:
    text = family_page(family)
    assert text.startswith(f"# {family.name}\n") and "## What was run" in text
    assert len(family.refused) >= 5
    text = _without_targets(text)
    assert all(_without_targets(reason) in text for row in family.refused for reason in row)
    assert not family.section or _without_targets(family.section_text.strip()) in text


def _without_targets(text: str) -> str:
    """Markdown whose links lead nowhere; on a page of its own they lead elsewhere."""
    return re.sub(r"\]\([^)]*\)", "]()", text)


def test_families_with_a_section_of_their_own_have_it() -> None:
    assert len(FAMILIES) > 10
    assert sorted(f.section.split(":")[0].split()[0] for f in FAMILIES if f.section) == [
        "MLA",
        "Pictures",
        "States",
    ]
    states = next(family for family in FAMILIES if family.section.startswith("States"))
    assert any("chain" in what for what, _ in states.refused)


def test_who_refuses_something_of_a_family_that_is_not_there_is_told() -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="Gemma 9"):
        read_families(text.replace("limit | Pictures", "limit | Gemma 9; Pictures"))


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://a.b/c.js"></script>', ["https://a.b/c.js"]),
        ('<link rel="stylesheet" href="//a.b/c.css">', ["//a.b/c.css"]),
        ('<style>@import "https://a.b/c.css";</style>', ["https://a.b/c.css"]),
        ('<p style="background: url(https://a.b/c.png)">', ["https://a.b/c.png"]),
        (
            '<a href="https://a.b">read</a><img src="d.png"><link rel="canonical" href="https://a">',
            [],
        ),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page: str, found: list[str]) -> None:
    assert loaded_from_elsewhere(page) == found


def test_a_table_that_is_text_is_found() -> None:
    assert shown_as_written("<p>Rows:\n| a | b |\n</p><p>- no\n1. x</p>") == [
        "| a | b |",
        "- no",
        "1. x",
    ]
    assert shown_as_written("<p>a - b | c</p><table><tr><td>| </td></tr></table>") == []


def test_the_theme_is_asked_for_no_font_of_another_host() -> None:
    assert "\n  font: false\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_links_that_lead_nowhere_are_found() -> None:
    pages = {
        "a.html": '<h1 id="top"></h1><a href="b/c.html#there">x</a><a href="#gone">y</a>',
        "b/c.html": '<a name="there"></a><a href="../a.html#top">x</a><a href="docs/a.md">y</a>',
    }
    files = frozenset([*pages, "picture.png"])
    assert [*broken_links(pages, files)] == [
        "a.html links to #gone",
        "b/c.html links to docs/a.md",
    ]
