# SPDX-License-Identifier: Apache-2.0
"""Runs of a table in a file, one a line: what is there is not run again.

folder/settings.json    the table, the model and the sampling; runs of others do not go in
folder/runs.jsonl       {"task": …, "arm": …, "judged": …}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.files import write_text
from vllm_choreo.lab.cli.task import unreadable
from vllm_choreo.lab.study.scores import Judged
from vllm_choreo.testing.models import fetch

_SETTINGS, _RUNS = "settings.json", "runs.jsonl"


class RunLog:
    """Judged runs of a table's arms on its tasks.

    Args:
        folder: an existing folder, with or without runs.
        settings: everything that runs depend on besides task and arm, as plain data.

    Raises:
        ChoreoError: the folder has runs with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._file = folder / _RUNS
        self._judged: dict[tuple[str, str], Judged] = {}
        saved = folder / _SETTINGS
        if saved.exists():
            _check_same(folder, json.loads(saved.read_text("utf-8")), settings)
        else:
            write_text(saved, json.dumps(dict(settings), indent=1) + "\n")
        if self._file.exists():
            self._read()

    def __contains__(self, run: tuple[str, str]) -> bool:
        """Return whether there is a run of `(task id, arm name)`."""
        return run in self._judged

    def __getitem__(self, run: tuple[str, str]) -> Judged:
        return self._judged[run]

    def add(self, task: str, arm: str, judged: Judged) -> None:
        """Write a run at once."""
        line = json.dumps({"task": task, "arm": arm, "judged": asdict(judged)}, ensure_ascii=False)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._judged[task, arm] = judged

    def _read(self) -> None:
        """Read whole lines; the last one may have been cut off, and is dropped."""
        text = self._file.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(self._file, whole)
        for line in whole.splitlines():
            run = json.loads(line)
            judged = Judged(**{**run["judged"], "answers": tuple(run["judged"]["answers"])})
            self._judged[run["task"], run["arm"]] = judged


def file_digest(file: Path) -> str:
    """SHA-256 of a file that runs depend on, in hexadecimal digits.

    Raises:
        ChoreoError: it cannot be read.
    """
    try:
        return fetch.file_digest(file)
    except OSError as error:
        raise unreadable(file, error) from error


def _check_same(folder: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ChoreoError(
                f"{folder} has runs with {name} {saved.get(name)!r}: run with the same, or name "
                "another folder with --out",
                parameter=name,
                value=value,
            )
