# SPDX-License-Identifier: Apache-2.0
"""The record of a run: CSV files, the machine in words, the command."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent
RESULTS = BENCHMARKS / "results"
RESULTS_PAGE = BENCHMARKS / "RESULTS.md"
# All pages whose tables are made of the CSV files.
_DOCS = BENCHMARKS.parent / "docs"
_NAMES = ("papers", "fleet", "models", "gpu", "on-ramps", "planner", "variants")
PAGES = (RESULTS_PAGE, *(_DOCS / f"{name}.md" for name in _NAMES))


def machine() -> dict[str, Any]:
    """What the numbers were measured on; names neither the host nor any folder."""
    import torch
    import vllm

    import vllm_choreo

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _isa(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "vllm_choreo": vllm_choreo.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    name = found.get("model name", platform.machine())
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"


def _isa() -> str:
    from vllm_choreo.ops import cpu

    return cpu.available_isas()[0] if cpu.unavailable_reason() is None else "none (slow path)"


def command_line() -> str:
    """How this program was started, for the record: as a shell takes it, files by their names."""
    spec = sys.modules["__main__"].__spec__
    program = "?" if spec is None else spec.name.removesuffix(".__main__")
    words = (
        Path(word).name if "/" in word and Path(word).exists() else word for word in sys.argv[1:]
    )
    return " ".join(["python -m", program, *map(shlex.quote, words)])


def record() -> dict[str, Any]:
    """The columns that every row of a run's CSV files ends with: machine, versions, command."""
    return {**machine(), "command": command_line()}


def read_numbers(path: Path, command: str, *fields: str) -> dict[str, Any]:
    """Read a JSON file that a command has written.

    Raises:
        SystemExit: it is not there, or has not these fields.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        told = f"{path}: nothing can be read ({error}): name what `{command}` wrote"
        raise SystemExit(told) from error
    missing = [field for field in fields if not isinstance(found, dict) or field not in found]
    if missing:
        raise SystemExit(f"{path}: lacks {', '.join(missing)}: run `{command}` anew")
    return dict(found)


def write_csv(name: str, rows: Sequence[Mapping[str, Any]], **constant: Any) -> Path:
    """Write `results/<name>.csv`; `constant` values are repeated in every row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    full = [{**row, **constant} for row in rows]
    names = list(dict.fromkeys(key for row in full for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(full)
    return path


def read_csv(name: str) -> list[dict[str, str]]:
    """The rows of `results/<name>.csv`; none if it was never written."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of_others(name: str, **of: str) -> list[dict[str, str]]:
    """Rows of `results/<name>.csv` that a run of these values leaves as they are."""
    return [row for row in read_csv(name) if any(row.get(key) != of[key] for key in of)]


def machines_in_words(rows: Sequence[Mapping[str, str]]) -> str:
    """The commands that wrote rows of CSV files, by the machine and versions that they ran on."""
    found: dict[str, list[str]] = {}
    for row in rows:
        machine = ", ".join(form.format(row[key]) for key, form in _MACHINE.items() if row.get(key))
        found.setdefault(machine, []).append(f"`{row['command']}`" if "command" in row else "")
    lines = (
        ", ".join(filter(None, [*dict.fromkeys(commands), machine]))
        for machine, commands in found.items()
    )
    return " ".join(f"{line}." for line in lines)


_MACHINE = {
    "date": "{}",
    "cpu": "{}",
    "cores": "{} cores",
    "cpus": "{} cores",
    "threads": "{} threads",
    "isa": "kernels {}",
    "python": "Python {}",
    "torch": "torch {}",
    "vllm": "vLLM {}",
    "vllm_choreo": "vllm-choreo {}",
}
