# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run --server`: from the command line to the page, without an engine here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notes import problems_of
from vllm_choreo.cli import main as cli
from vllm_choreo.lab.cli.options import WORKFLOWS
from vllm_choreo.lab.problems.programs import CONSENT
from vllm_choreo.testing.server import MODEL_NAME, Server
from vllm_choreo.transcript.transcript import Transcript

SHORT = ("--limit", "1", "--max-tokens", "4")
SMALL = {
    "tree_of_thoughts": ("--candidates", "2", "--voters", "2"),
    "parallel_debate": ("--agents", "2", "--rounds", "2"),
    "iterative_debate": ("--rounds", "1"),
    "prisoners_dilemma": ("--rounds", "1", "--leak", "none"),
}
# As if neither were installed: an import of them fails.
WITHOUT_ENGINE = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None
from vllm_choreo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def made(out: Path) -> dict[str, Any]:
    """The transcripts in a folder, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_every_workflow(
    workflow: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONSENT, "1")
    arguments = ["run", workflow, "--server", server.base_url, "--api-key", server.keys[0]]
    arguments += [*SHORT, *SMALL.get(workflow, ()), *problems_of(workflow), "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    ((name, data),) = made(tmp_path).items()
    assert name == "transcript.json" and data["mode"] == "choreo" and data["answers"]
    steps = data["steps"]
    assert all(step["usage"]["encoded_tokens"] > 0 for step in steps)
    ids = [step["id"] for step in steps]
    for number, step in enumerate(steps):
        assert {parent for parent, _, _ in step["parents"]} <= set(ids[:number])
        assert step["metrics"]["submitted"] + step["metrics"]["latency"] <= data["seconds"]
    assert data["inputs"]["sampling_params"]["max_tokens"] == 4
    Transcript.from_json(data)


def test_both_modes_in_a_process_that_has_no_engine(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.keys[0])
    arguments = ["run", "tree_of_thoughts", *SMALL["tree_of_thoughts"], *SHORT, "--mode", "both"]
    arguments += ["--server", server.base_url, "--out", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE, *arguments],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    transcripts = made(tmp_path)
    assert list(transcripts) == ["transcript-baseline.json", "transcript-choreo.json"]
    authors = [[step["author"] for step in data["steps"]] for data in transcripts.values()]
    assert authors[0] == authors[1]
    for mode in ("choreo", "baseline"):
        assert re.search(rf"^word_problems  {mode} +[01] of 1 +8 ", run.stdout, re.MULTILINE)
    page = (tmp_path / "index.html").read_text()
    for fact in (MODEL_NAME, server.base_url, "not emptied between runs", "at most 4 per answer"):
        assert fact in page


def test_a_key_that_is_not_accepted(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "direct", "--server", server.base_url, "--out", str(tmp_path)]
    assert cli.main([*arguments, "--api-key", "wrong"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "API key" in line and server.base_url in line


def test_a_problem_that_does_not_fit_fails_alone(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": text, "answers": ["Anna"]} for text in ("Who?", "word " * 3000)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    arguments = ["run", "direct", "--data", str(data), "--max-tokens", "2", "--out", str(out)]
    arguments += ["--server", server.base_url, "--api-key", server.keys[0]]
    assert cli.main(arguments) == 1
    assert {path.name for path in out.iterdir()} == {"transcript-001.json", "index.html"}
    (line,) = [row for row in capsys.readouterr().err.splitlines() if "vllm-choreo:" in row]
    assert "questions/2, choreo" in line
