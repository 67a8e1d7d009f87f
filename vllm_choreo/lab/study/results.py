# SPDX-License-Identifier: Apache-2.0
"""Results of a study: the numbers, from which a page is drawn, and a table of scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.report import aligned
from vllm_choreo.lab.report.markup import milliseconds, percent, whole

PAGE = "index.html"

Row = Mapping[str, Any]

_CELLS: dict[str, Callable[[Row], str]] = {
    "right": lambda row: f"{row['right']} of {row['judged']}" if row["judged"] else "-",
    "difference": lambda row: percent(row["difference"], sign=True),
    "p": lambda row: "-" if row["p_value"] is None else f"{row['p_value']:.3f}",
    "same": lambda row: percent(row["same"]),
    "KL": lambda row: "-" if row["kl"] is None else f"{row['kl']:.4f}",
    "coverage": lambda row: percent(row["coverage"]),
    "gap": lambda row: percent(row["gap_closed"]),
    "KL gap": lambda row: percent(row["kl_gap_closed"]),
    "encoded": lambda row: whole(row["encoded"]),
    "TTFT": lambda row: milliseconds(row["ttft"]),
}


def write_results(out: Path, name: str, data: Mapping[str, object], page: str) -> None:
    """Write the numbers as JSON, and the page.

    Args:
        out: an existing folder.
        name: name of the file of the numbers.
        page: text of an HTML file.
    """
    write_text(out / name, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    write_text(out / PAGE, page)


def scores_table(sets: Sequence[Row], names: Mapping[str, str], columns: Sequence[str]) -> str:
    """Draw a line for each arm of each set.

    Args:
        sets: sets of problems, each with a `name` and `rows`, see `rows_of`.
        names: values of a row that are names, by what stands above them.
        columns: further columns, of "right", "difference", "p", "same", "KL", "coverage", "gap",
            "KL gap", "encoded" and "TTFT".
    """
    lines = [
        (
            *(one["name"], *(row[name] or "-" for name in names.values())),
            *(_CELLS[column](row) for column in columns),
        )
        for one in sets
        for row in one["rows"]
    ]
    return aligned([("problems", *names, *columns), *lines], num_names=1 + len(names))
