# SPDX-License-Identifier: Apache-2.0
"""The tables of rivals' settings, one for each layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from benchmarks.harness.stats import median, paired_ratio_interval
from benchmarks.harness.tables import (
    Cell,
    Row,
    Rows,
    Table,
    Values,
    mean,
    middle,
    of,
    only,
    spread,
    with_ends,
)
from benchmarks.rivals.sides import STOCK
from vllm_choreo.lab.study.stats import bootstrap_interval, mcnemar

LAYOUTS = ("permuted", "multidoc", "ragqa", "agents")
# Of each row of a side and that of the text, whatever is told of both.
_Pairs = list[tuple[Row, Row]]


def _filled(column: str, scale: float = 1.0) -> Values:
    """A column of the rows that have something in it."""
    return lambda rows: of(column, scale)([row for row in rows if row[column] != ""])


def _share_cached(rows: Rows) -> list[float]:
    pairs = zip(of("cached_tokens")(rows), of("prompt_tokens")(rows), strict=True)
    return [cached / max(1.0, tokens) for cached, tokens in pairs]


def _columns(rows: Rows) -> Mapping[str, Cell]:
    """Columns of a layout; those that compare with the text say nothing where there is none."""
    text = {_request(row): row for row in only(side=STOCK)(rows)}

    def against_text(cell: Callable[[_Pairs], str]) -> Cell:
        def told(group: Rows) -> str:
            pairs = [(row, text[_request(row)]) for row in group if _request(row) in text]
            is_text = group[0]["side"] == STOCK
            return "" if is_text or not pairs else cell(pairs)

        return told

    return {
        "requests": lambda group: len(group),
        "prompt tokens": middle(of("prompt_tokens"), ".0f"),
        "first token, ms": spread(of("first_token_s", 1e3), ".0f"),
        "stock / side": against_text(_times_faster),
        "whole answer, ms": spread(of("seconds", 1e3), ".0f"),
        "prompt reused": middle(_share_cached, ".0%"),
        "same answer as stock": mean(of("same"), ".2f"),
        "F1 to stock": mean(of("f1_to_stock"), ".2f"),
        "F1 to gold": mean(_filled("f1"), ".3f"),
        "minus that of stock": against_text(_f1_difference),
        "right": lambda group: f"{sum(found):.0f}" if (found := _filled("right")(group)) else "",
        "stock alone": against_text(lambda pairs: _only_one(pairs, 1)),
        "side alone": against_text(lambda pairs: _only_one(pairs, 0)),
        "McNemar's p": against_text(_p_value),
    }


def _request(row: Row) -> tuple[str, str]:
    """What the sides were asked in turn: the file of questions, if there is one, and a number."""
    return row.get("data", ""), row["number"]


def _times_faster(pairs: _Pairs) -> str:
    side, text = ([float(pair[at]["first_token_s"]) for pair in pairs] for at in (0, 1))
    found = f"{median(text) / median(side):.1f}"
    if len(pairs) < 2:
        return found
    low, high = paired_ratio_interval(text, side)
    return f"{found} [{low:.1f}, {high:.1f}]"


def _f1_difference(pairs: _Pairs) -> str:
    found = [float(a["f1"]) - float(b["f1"]) for a, b in pairs if a["f1"] != ""]
    return with_ends(found, fmean, lambda values: bootstrap_interval(values, fmean), "+.3f")


def _right(pairs: _Pairs) -> list[tuple[int, int]]:
    """Of each question, whether the side and the text are right."""
    told = [(row.get("right", ""), other.get("right", "")) for row, other in pairs]
    return [(int(one), int(other)) for one, other in told if one != ""]


def _only_one(pairs: _Pairs, at: int) -> str:
    wanted = (0, 1) if at else (1, 0)
    found = _right(pairs)
    return str(found.count(wanted)) if found else ""


def _p_value(pairs: _Pairs) -> str:
    found = _right(pairs)
    return f"{mcnemar(found.count((0, 1)), found.count((1, 0))):.3f}" if found else ""


TABLES = {
    f"rivals_{name}": Table(
        f"rivals_{name}",
        {**({"questions of": "data"} if name == "ragqa" else {}), "side": "side"},
        _columns,
        only(kind="timed"),
    )
    for name in LAYOUTS
}
TABLES["rivals_plans"] = Table(
    "rivals_plans",
    {"setting": "layout"},
    {
        "requests": lambda group: len(group),
        "prompt tokens": middle(of("prompt_tokens"), ".0f"),
        **{way: middle(of(way), ".0f") for way in ("text", "seen", "alone")},
    },
)
