# SPDX-License-Identifier: Apache-2.0
"""The demo, as a user runs it, on its first task of each kind, with a shallow model."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.exhaustive  # `make demo` shows it, too
def test_the_demo_measures_both_modes_and_writes_its_results(
    tmp_path: Path, shallow_model_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "vllm_choreo.cli.main",
        "demo",
        "--limit",
        "2",
        "--out",
        str(out),
    ]
    command += ["--model", str(shallow_model_path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert shown.returncode == 0, shown.stderr[-3000:]

    names = {path.name for path in out.iterdir()}
    assert names == {"calls.csv", "answers.md", "workflows.svg", "workflows.png"}
    assert (out / "workflows.png").stat().st_size > 50_000
    for word in ("parallel debate", "tree of thoughts", "baseline", "choreo", "× less"):
        assert word in shown.stdout

    encoded: dict[tuple[str, str], int] = defaultdict(int)
    generated: dict[tuple[str, str], int] = defaultdict(int)
    with (out / "calls.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["workflow"], row["mode"])
            encoded[key] += int(row["encoded_tokens"])
            generated[key] += int(row["generated_tokens"])
    for workflow in ("parallel debate", "tree of thoughts"):
        assert generated[workflow, "choreo"] == generated[workflow, "baseline"] > 100
        # Counts, not times: they do not depend on the machine.
        assert 2 * encoded[workflow, "choreo"] < encoded[workflow, "baseline"]
