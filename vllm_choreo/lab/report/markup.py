# SPDX-License-Identifier: Apache-2.0
"""Pieces of pages that are drawn when they are written, without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from vllm_choreo.transcript.page import fragment


def filled(title: str, facts: Mapping[str, Any], body: str) -> str:
    """Fill a page that loads nothing from elsewhere.

    Args:
        title: heading of the page, text.
        facts: facts that its header shows, by name.
        body: markup.
    """
    shown = " · ".join(f"{text(k)} <b>{text(v)}</b>" for k, v in facts.items())
    frame = (files("vllm_choreo.lab.report") / "charts.html").read_text(encoding="utf-8")
    page = frame.replace("<!-- include style.html -->", fragment("style.html"))
    page = page.replace("{{title}}", text(title))
    for name, content in (("facts", shown), ("body", body)):
        page = page.replace("{{" + name + "}}", content, 1)
    return page


def section(title: str, *parts: str) -> str:
    """Put markup under a title that is markup, too."""
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells that are texts, not markup."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    markup = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{markup}</div>'


def note(content: str) -> str:
    """Make a paragraph of a remark, which is text."""
    return f'<p class="note">{text(content)}</p>'


def text(value: Any) -> str:
    """Write anything as text, never as markup."""
    return html.escape(str(value))


def percent(share: float | None, sign: bool = False) -> str:
    """Write a share in per cent; a dash for None."""
    return hundredths(share, sign) + ("" if share is None else " %")


def hundredths(share: float | None, sign: bool = False) -> str:
    """Write a share times a hundred; a dash for None."""
    return "–" if share is None else f"{100 * share:{'+' if sign else ''}.1f}"


def milliseconds(seconds: float | None) -> str:
    """Write seconds in milliseconds; a dash for None."""
    return "–" if seconds is None else f"{1000 * seconds:,.0f} ms"


def nats(value: float | None) -> str:
    """Write a divergence; a dash for None."""
    return "–" if value is None else f"{value:.4f}"
