# SPDX-License-Identifier: Apache-2.0
"""What `python -m benchmarks.gpu step` measured, beside what was predicted."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.model.bounds import GPUS
from benchmarks.gpu.model.cost import TODAY
from benchmarks.gpu.model.tables import MODEL
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table

# Columns of step.csv, what they are multiplied by, and what predicts them.
FIGURES = {
    "ttft_mean_ms": (1.0, "ttft_mean_ms"),
    "decode_step_ms": (1.0, "decode_step_ms"),
    "estimated_seconds": (1e3, "total_ms"),
}
Line = tuple[str, ...]


def compare(measured: Path, predicted: Sequence[Mapping[str, str]]) -> str:
    """Table of the choreographed side's medians, each with its prediction and a verdict.

    Args:
        measured: step.csv of a run with the default model.
        predicted: rows of gpu_model.csv.

    Raises:
        ValueError: the file is of a dry run, or of a GPU that nothing was predicted for.
    """
    with measured.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["side"] == TODAY.name]
    if not rows or "dry_run" in rows[0]:
        raise ValueError(f"{measured} measures nothing: give step.csv of a run on a GPU")
    device = rows[0]["device"]
    gpu = next((name for name in GPUS if name in device), None)
    if gpu is None:
        raise ValueError(f"{measured} is of {device!r}; predicted are {', '.join(GPUS)}")
    chosen = {"gpu": gpu, "model": MODEL, "side": TODAY.name}
    of_gpu = [row for row in predicted if all(row[k] == v for k, v in chosen.items())]
    lines = [line for row in of_gpu for line in _lines(row, rows)]
    return table(("workflow", "figure", "measured", "predicted", "verdict"), lines)


def _lines(predicted: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> list[Line]:
    of_workflow = [row for row in rows if row["workflow"] == predicted["workflow"]]
    if not of_workflow:
        return []
    lines: list[Line] = []
    for column, (scale, name) in FIGURES.items():
        found = scale * median([float(row[column]) for row in of_workflow])
        value, low, high = (float(predicted[f"{name}{end}"]) for end in ("", "_low", "_high"))
        verdict = "faster" if found < low else "slower" if found > high else "within"
        said = f"{value:.2f} [{low:.2f}, {high:.2f}]"
        lines.append((predicted["workflow"], name, f"{found:.2f}", said, verdict))
    return lines
