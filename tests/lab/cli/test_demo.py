# SPDX-License-Identifier: Apache-2.0
"""The demo, as a user runs it, on its first task of each kind, with a shallow model."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from vllm_choreo.lab.cli.demo import progress_bar
from vllm_choreo.lab.cli.first_comparison import comparison_text
from vllm_choreo.semantics.message import Message, Metrics, Usage


def test_the_bar_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    drawn = io.StringIO()
    with progress_bar(204, file=drawn) as bar:
        bar.set_description("debate 1/6, choreo  ")
        bar.update(101)
        bar.refresh()
    lines = drawn.getvalue().split("\r")
    assert any("debate 1/6" in line and "101/204" in line and "#" in line for line in lines)
    assert max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    narrow = io.StringIO()
    with progress_bar(204, file=narrow) as bar:
        bar.set_description("debate 1/6, choreo  ")
        bar.refresh()
    assert max(map(len, narrow.getvalue().split("\r"))) <= 40


def test_the_first_comparison_fits_and_ends_at_the_end_of_the_turn() -> None:
    said = "It burned up to 400 tons of coal a year. " * 5 + "<|im_end|>\n<|im_start|>"
    answers = {
        mode: Message(
            *("session/1", said, (), 0, 0, (), said, (), None, "length"),
            usage=Usage(False, 0, 0, encoded_tokens=180),
            metrics=Metrics(0.0, None, ttft=ttft, latency=2.0),
        )
        for mode, ttft in (("baseline", 1.2341), ("choreo", 0.0312))
    }
    text = comparison_text(answers)
    assert "as text: first token after 1,234 ms" in text
    assert "choreographed: first token after 31 ms" in text
    assert "im_end" not in text and "im_start" not in text
    assert max(map(len, text.splitlines())) <= 80


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
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr[-3000:]

    names = {path.name for path in out.iterdir()}
    assert names == {"calls.csv", "answers.md", "workflows.svg", "workflows.png"}
    assert (out / "workflows.png").stat().st_size > 50_000
    # One small comparison comes first, and nothing is wider than a terminal.
    begin = shown.stdout.index("choreographed: first token after")
    assert begin < shown.stdout.index("Now 68 calls") < shown.stdout.index("tree of thoughts")
    # Of vLLM's log at most a line a minute: it runs for some.
    assert sum(word in shown.stderr for word in ("INFO ", "WARNING ", "Triton is installed")) <= 1
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
