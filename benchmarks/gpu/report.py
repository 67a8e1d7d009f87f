# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: lines on stdout, CSV files, and a page of bars reached and missed."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.tables import table

DRY = "DRY RUN on CPU, kernels interpreted: no number here is a measurement"


@dataclass(frozen=True)
class Bar:
    """A figure that must not lie below a bar, or above it.

    Attributes:
        name: what is measured.
        value: None where it could not be; `reason` says why.
    """

    name: str
    value: float | None
    bar: float
    is_least: bool = True
    reason: str = ""

    def verdict(self) -> str:
        if self.value is None:
            return f"not measured: {self.reason}"
        reached = self.value >= self.bar if self.is_least else self.value <= self.bar
        return "reached" if reached else "MISSED"


class Report:
    """Results of one run.

    Args:
        folder: made if it is missing; files of an earlier run in it are written over.
        device: `torch.device` in words; on "cpu" every file and page says that it is a dry run.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            sys.exit("no CUDA device: use --device cpu --shapes tiny for a dry run")
        self.is_dry = self.device.type == "cpu"
        self.folder = folder
        self.bars: list[Bar] = []
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.tables: list[str] = []
        self._start = time.perf_counter()
        self.machine = _machine(self.device)
        folder.mkdir(parents=True, exist_ok=True)
        self.say(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        self.write_summary()

    def say(self, line: str) -> None:
        """A line of progress, with the seconds since the start."""
        mark = "DRY " if self.is_dry else ""
        print(f"{mark}[{time.perf_counter() - self._start:5.1f} s] {line}", flush=True)

    def sheet(self, name: str, columns: Sequence[str]) -> Sheet:
        """An empty CSV file; in a dry run its name says so."""
        path = self._path(f"{name}.csv")
        record = {**self.machine, "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])}
        if self.is_dry:
            record = {"dry_run": DRY, **record}
        return Sheet(path, columns, record)

    def bar(self, bar: Bar) -> None:
        """Record a bar, and whether it was reached."""
        self.bars.append(bar)
        self.say(
            f"bar: {bar.name}: {_number(bar.value)} ({_sign(bar)} {bar.bar}) {self._verdict(bar)}"
        )
        self.write_summary()

    def error(self, text: str) -> None:
        """Record that a result is wrong, or that there is none."""
        self.errors.append(text)
        self.say(f"WRONG: {text}")
        self.write_summary()

    def note(self, text: str) -> None:
        """A line for the page."""
        self.notes.append(text)
        self.say(text)
        self.write_summary()

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table of results, on stdout and on the page."""
        title = f"{title} ({DRY})" if self.is_dry else title
        self.tables.append(f"## {title}\n\n{table(head, rows)}")
        print(f"\n{self.tables[-1]}\n", flush=True)
        self.write_summary()

    def status(self) -> int:
        """See `benchmarks.gpu.__main__`."""
        if self.errors:
            return 1
        missed = any(bar.verdict() == "MISSED" for bar in self.bars)
        return 3 if missed and not self.is_dry else 0

    def write_summary(self, is_done: bool = False) -> None:
        ending = "" if is_done else "\n(The run was cut off here.)\n"
        self._path("summary.md").write_text(self.summary() + ending)

    def _path(self, name: str) -> Path:
        """Files of a dry run have names of their own, and never replace those of a real one."""
        return self.folder / (f"dry-run-{name}" if self.is_dry else name)

    def summary(self) -> str:
        """A short page in Markdown."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [
            (b.name, _number(b.value), f"{_sign(b)} {b.bar}", self._verdict(b)) for b in self.bars
        ]
        wrong = [f"- {text}" for text in self.errors] or ["None."]
        parts = [
            "# GPU benchmarks" + (" (dry run)" if self.is_dry else ""),
            *([f"**{DRY}.**"] if self.is_dry else []),
            f"`python -m benchmarks.gpu {' '.join(sys.argv[1:])}`: {machine}.",
            "## Bars",
            table(("bar", "found", "wanted", "verdict"), lines),
            "## Wrong or missing results",
            "\n".join(wrong),
        ]
        if self.notes:
            parts += ["## Notes", "\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join([*parts, *self.tables]) + "\n"

    def _verdict(self, bar: Bar) -> str:
        if self.is_dry and bar.value is not None:
            return "dry run, not measured"
        return bar.verdict()


class Sheet:
    """A CSV file that is written row by row; `record` is repeated in every row."""

    def __init__(self, path: Path, columns: Sequence[str], record: Mapping[str, Any]) -> None:
        self._path, self._record = path, record
        self._columns = [*columns, *record]
        with path.open("w", newline="") as file:
            self._writer(file).writeheader()

    def add(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError: the row has a key that is no column."""
        plain = {key: _rounded(value) for key, value in row.items()}
        with self._path.open("a", newline="") as file:
            self._writer(file).writerow({**plain, **self._record})

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, fieldnames=self._columns, lineterminator="\n")


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _sign(bar: Bar) -> str:
    return "≥" if bar.is_least else "≤"


def _machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on; names neither the host nor any folder."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": _driver() if device.type == "cuda" else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "xformers": _version("xformers"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return lines[0] if lines else "unknown"
