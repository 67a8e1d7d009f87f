# SPDX-License-Identifier: Apache-2.0
"""A page for each family of models, made of what docs/models.md says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINKED = re.compile(r"\[(.+)\]\(#(.+)\)")
_ALL = "all"


@dataclass(frozen=True)
class Family:
    """What docs/models.md says of a family.

    Attributes:
        name: as in the first column.
        what, beyond: the other columns.
        section: the heading of the section about it, empty if it has none.
        section_text: that section, without its heading.
        refused: what is refused and why.
    """

    name: str
    what: str
    beyond: str
    section: str
    section_text: str
    refused: tuple[tuple[str, str], ...]

    @property
    def page(self) -> str:
        """Path of its page in the site."""
        return f"models/{slug(self.name)}.md"


def slug(heading: str) -> str:
    """The anchor that a heading gets, here and on the sites that show repositories."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))


def read_families(text: str) -> list[Family]:
    """Read the families from the text of docs/models.md, in the order of its table."""
    sections = dict(_sections(text))
    by_slug = {slug(heading): heading for heading in sections}
    rows = _rows(sections["What runs"])
    refused = [(_names(of), what, why) for what, why, of in _rows(sections["What is refused"])]
    names = [_LINKED.sub(r"\1", row[0]) for row in rows]
    if unknown := {name for of, *_ in refused for name in of} - {_ALL, *names}:
        raise ValueError(
            f"docs/models.md refuses something of families it does not list: {unknown}"
        )
    families = []
    for name, (cell, what, beyond) in zip(names, rows, strict=True):
        linked = _LINKED.fullmatch(cell)
        section = by_slug[linked[2]] if linked else ""
        reasons = tuple((what, why) for of, what, why in refused if {_ALL, name} & of)
        families.append(Family(name, what, beyond, section, sections.get(section, ""), reasons))
    return families


def family_page(family: Family) -> str:
    """Write the page of a family, as Markdown that stands at docs/models.md."""
    lines = [f"# {family.name}", "", f"**What of it:** {family.what or 'all that is below'}.", ""]
    lines += ["## What was run", ""]
    lines += ["Tiny models against the dense oracle: [which choreographies](models.md#what-runs)."]
    lines += [f"Beyond that: {family.beyond}."] if family.beyond else []
    if family.section:
        lines += ["", f"## {family.section}", "", family.section_text.strip()]
    lines += ["", "## What is refused", "", "| what | why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in family.refused]
    page = "\n".join([*lines, ""])
    headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    # Sections of docs/models.md that are not on this page.
    return re.sub(
        r"\]\(#([^)]+)\)", lambda m: m[0] if m[1] in headings else f"](models.md#{m[1]})", page
    )


def _sections(text: str) -> list[tuple[str, str]]:
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _rows(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return rows[2:]


def _names(cell: str) -> set[str]:
    return {name.strip() for name in cell.split(";")}
