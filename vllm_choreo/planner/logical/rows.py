# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: an operator has a value for each, and two operators choose rows of others.

reviews        r0  r1  r2  r3          batch_slice(reviews, 0, 2)    r0  r1
first, last    r0  r1 │ r2  r3         batch_concat(last, first)     r2  r3  r0  r1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_choreo.planner.errors import BatchLengthError
from vllm_choreo.planner.logical.nodes import Node, Operators

CHOOSERS = ("batch_slice", "batch_concat")


def row_counts(
    graph: Operators, given: Mapping[int, int | None], size: int
) -> tuple[tuple[int | None, ...], int]:
    """Count the rows of each operator, and those of the results.

    Args:
        graph: the operators.
        given: rows of inputs and data; None: one value for however many there are.
        size: rows of an input that has a list, where a chooser reads what has no number of rows.

    Returns:
        The counts, None for what has the same value in every row; and the number of results.

    Raises:
        BatchLengthError: operators or results of unequal numbers of rows, or no result.
    """
    counts: list[int | None] = []
    for number, node in enumerate(graph.nodes):
        before = [counts[given_number] for given_number in node.inputs]
        if number in given:
            counts.append(given[number])
        elif node.kind == "batch_slice":
            rows = range(size if before[0] is None else before[0])
            counts.append(len(rows[node.attrs["start"] : node.attrs["stop"]]))
        elif node.kind == "batch_concat":
            counts.append(sum(size if count is None else count for count in before))
        else:
            counts.append(_common(before, node))
    results = _common([counts[number] for number in graph.outputs.values()], None)
    if results == 0:
        raise BatchLengthError("batch_slice leaves no query")
    return tuple(counts), size if results is None else results


def _common(counts: Sequence[int | None], node: Node | None) -> int | None:
    """Return the one number of rows that these have; None: each has the same in every row."""
    found = {count for count in counts if count is not None}
    if len(found) > 1:
        what = "what it reads has" if node is not None else "results have"
        raise BatchLengthError(
            f"{what} {' and '.join(map(str, sorted(found)))} rows: one number of them is needed, "
            "take some with batch_slice",
            op="" if node is None else node.name,
            line="" if node is None else node.line,
        )
    return found.pop() if found else None


def read_rows(
    node: Node, row: int, counts: Sequence[int | None], size: int
) -> list[tuple[int, int]]:
    """Return what an operator reads for one of its rows, as (operator, its row)."""
    if node.kind not in CHOOSERS:
        return [(given, row) for given in node.inputs]
    for given in node.inputs:
        count = counts[given]
        rows = range(size if count is None else count)
        if node.kind == "batch_slice":
            rows = rows[node.attrs["start"] : node.attrs["stop"]]
        if row < len(rows):
            return [(given, rows[row])]
        row -= len(rows)
    raise AssertionError("no such row")
