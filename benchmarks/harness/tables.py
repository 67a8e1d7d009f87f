# SPDX-License-Identifier: Apache-2.0
"""Tables from CSV files, by declaration, and the regions of pages that hold them.

A `Table` names a file, what its lines are grouped by, and a cell for each column. Cells are made
from values: `spread(of("ttft_s", 1e3, side="text"), ".0f")`. A region of a page lists tables;
they are followed by the commands that measured them.

    <!-- table: NAME, NAME -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.harness import stats
from benchmarks.harness.record import machines_in_words, read_csv
from vllm_choreo.lab.study.stats import bootstrap_interval

Row = Mapping[str, Any]
Rows = Sequence[Row]
Values = Callable[[Rows], Sequence[float]]
Cell = Callable[[Rows], Any]


class Table(NamedTuple):
    """The declaration of a table.

    Attributes:
        file: `results/<file>.csv`, or several that are read one after the other.
        lines: heading: column, or function of a row; rows that agree in all of them are one line.
        columns: heading: what is said of the rows of a line; or a function of all rows.
        rows: makes the rows that count from those of the file.
    """

    file: str | tuple[str, ...]
    lines: Mapping[str, str | Callable[[Row], Any]]
    columns: Mapping[str, Cell] | Callable[[Rows], Mapping[str, Cell]]
    rows: Callable[[Rows], Rows] = list

    def read(self) -> Rows:
        """The rows of the files; none if they were never written."""
        files = (self.file,) if isinstance(self.file, str) else self.file
        return [row for file in files for row in read_csv(file)]

    def markdown(self, rows: Rows) -> str:
        """The table of a file's rows; columns that say nothing are left out."""
        counted = self.rows(rows)
        columns = self.columns(counted) if callable(self.columns) else self.columns
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in counted:
            keys = (row[key] if isinstance(key, str) else key(row) for key in self.lines.values())
            groups.setdefault(tuple(keys), []).append(row)
        cells = {h: [cell(group) for group in groups.values()] for h, cell in columns.items()}
        cells = {head: column for head, column in cells.items() if any(c != "" for c in column)}
        lines = zip(groups, *cells.values(), strict=True)
        return table([*self.lines, *cells], ([*keys, *rest] for keys, *rest in lines))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def only(**where: Any) -> Callable[[Rows], Rows]:
    """The rows that have these values; one of them, where a tuple is given."""

    def chosen(rows: Rows) -> Rows:
        return [row for row in rows if all(_is(row[key], value) for key, value in where.items())]

    return chosen


def _is(found: Any, wanted: Any) -> bool:
    several = wanted if isinstance(wanted, tuple) else (wanted,)
    return str(found) in map(str, several)


# -- values ----------------------------------------------------------------------------------------


def of(column: str, scale: float = 1.0, **where: Any) -> Values:
    """A column of the rows that have these values."""
    return lambda rows: [scale * float(row[column]) for row in only(**where)(rows)]


def over(above: Values, below: Values) -> Values:
    """Ratios, pair by pair."""
    return lambda rows: [a / b for a, b in zip(above(rows), below(rows), strict=True)]


# -- cells -----------------------------------------------------------------------------------------


def text(column: str, **where: Any) -> Cell:
    """A column of the first row, as it stands."""
    return lambda rows: next((row[column] for row in only(**where)(rows)), "")


def middle(values: Values, form: str) -> Cell:
    """The median."""
    return lambda rows: f"{stats.median(found):{form}}" if (found := values(rows)) else ""


def ratio(above: Values, below: Values, form: str) -> Cell:
    """A ratio of two medians."""
    return paired_ratio(above, below, form, has_interval=False)


def paired_ratio(above: Values, below: Values, form: str, has_interval: bool = True) -> Cell:
    """The same with the 95% bootstrap interval over pairs; one pair has none."""

    def cell(rows: Rows) -> str:
        a, b = above(rows), below(rows)
        if not a or not b:
            return ""
        found = f"{stats.median(a) / stats.median(b):{form}}"
        if not has_interval or len(a) < 2:
            return found
        low, high = stats.paired_ratio_interval(a, b)
        return f"{found} [{low:{form}}, {high:{form}}]"

    return cell


def spread(values: Values, form: str) -> Cell:
    """`median [first quartile, third quartile]`; one value has no spread."""
    return lambda rows: with_spread(values(rows), form)


def interval(values: Values, form: str) -> Cell:
    """`median [low, high]`, the 95% bootstrap interval; one value has none."""
    return lambda rows: with_ends(values(rows), stats.median, bootstrap_interval, form)


def mean(values: Values, form: str) -> Cell:
    """`mean [low, high]`, the 95% bootstrap interval; one value has none."""

    def ends(found: Sequence[float]) -> tuple[float, float]:
        return bootstrap_interval(found, fmean)

    return lambda rows: with_ends(values(rows), fmean, ends, form)


def with_spread(values: Iterable[float], form: str = ".0f") -> str:
    """`median [first quartile, third quartile]`; one value has no spread, and none is empty."""
    return with_ends(list(values), stats.median, stats.spread, form)


def with_ends(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    ends: Callable[[Sequence[float]], tuple[float, float]],
    form: str,
) -> str:
    """A statistic and its two ends, which one value does not have."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else ""
    low, high = ends(values)
    return f"{statistic(values):{form}} [{low:{form}}, {high:{form}}]"


def stored(column: str, form: str, scale: float = 1.0, **where: Any) -> Cell:
    """`value [low, high]` of the columns NAME, NAME_low and NAME_high of one row."""

    def cell(rows: Rows) -> str:
        found = only(**where)(rows)
        if not found or found[0][column] == "":
            return ""
        value, low, high = (scale * float(found[0][f"{column}{end}"]) for end in _ENDS)
        return f"{value:{form}} [{low:{form}}, {high:{form}}]"

    return cell


_ENDS = ("", "_low", "_high")


# -- pages -----------------------------------------------------------------------------------------

_REGION = re.compile(r"<!-- table: (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, tables: Mapping[str, Table]) -> str:
    """A page whose regions hold their tables.

    Raises KeyError: a region names a table that is not declared. FileNotFoundError: a table has no
    rows.
    """

    def region(match: re.Match[str]) -> str:
        found = [tables[name] for name in match[1].split(", ")]
        if not all(table.read() for table in found):
            raise FileNotFoundError(f"no rows for the region {match[1]!r}")
        return f"<!-- table: {match[1]} -->\n{as_text(found)} <!-- end -->"

    return _REGION.sub(region, page)


def as_text(tables: Iterable[Table]) -> str:
    """Tables that have rows, and the commands and machines that measured them."""
    read = [(table, rows) for table in tables if (rows := table.read())]
    parts = [table.markdown(rows) for table, rows in read]
    return "\n\n".join([*parts, machines_in_words([row for _, rows in read for row in rows])])
