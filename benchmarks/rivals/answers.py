# SPDX-License-Identifier: Apache-2.0
"""A file of answers as they come, one JSON object a line, from which a run that was ended goes on.

{"run": {…}}       what all answers depend on: layout, sizes, data, sides
{"layout": …}      a row for each answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.sides import Rows


class AnswerFile:
    """Answers of a run, those of before included.

    Args:
        path: the file; None: answers are kept in memory alone.
        run: what the answers depend on, as plain data.
        num_sides: sides that are asked each request.
        goes_on: take what is in the file; else it is written anew.

    Attributes:
        rows: answers to all requests up to the last counted one that all sides have answered.

    Raises:
        SystemExit: the file is of another run.
    """

    def __init__(
        self, path: Path | None, run: Mapping[str, Any], num_sides: int, goes_on: bool
    ) -> None:
        self._path = path
        head = json.dumps({"run": run}, sort_keys=True, ensure_ascii=False)
        self.rows: Rows = []
        if path is None:
            return
        if goes_on and path.exists():
            lines = path.read_text("utf-8").splitlines()
            if lines and lines[0] != head:
                raise SystemExit(f"{path} holds the answers of another run: name another file")
            self.rows = _complete(lines[1:], num_sides)
        lines = [head, *(json.dumps(row, ensure_ascii=False) for row in self.rows)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    @property
    def num_done(self) -> int:
        """Counted requests that all sides have answered."""
        return len({row["number"] for row in self.rows if row["kind"] == "timed"})

    @property
    def next_number(self) -> int:
        """Number of the request that comes next."""
        return 1 + max((row["number"] for row in self.rows), default=-1)

    def add(self, rows: Rows) -> None:
        """Add the answers to a request."""
        self.rows += rows
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _complete(lines: Sequence[str], num_sides: int) -> Rows:
    """Rows up to the last counted request that all sides have answered."""
    rows: Rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break  # whoever wrote it was killed
    # All sides answer a request before the next one is asked.
    groups = [rows[at : at + num_sides] for at in range(0, len(rows), num_sides)]
    while groups and (len(groups[-1]) < num_sides or groups[-1][0]["kind"] != "timed"):
        groups.pop()
    return [row for group in groups for row in group]
