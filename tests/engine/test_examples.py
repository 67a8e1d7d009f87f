# SPDX-License-Identifier: Apache-2.0
"""Programs of `examples` that bring their engine: each as it is started, and the notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# How many calls each makes, and the most tokens that a call may encode: header and answer.
CALLS = {"offline": 2, "debate": 6, "rag": 3}


@pytest.mark.exhaustive  # processes of their own; the README's example runs in every run
@pytest.mark.parametrize("name", CALLS)
def test_a_program_in_process_runs(name: str, embedded_model_path: Path) -> None:
    words = [f"examples/{name}.py", "--model", str(embedded_model_path), "--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT
    )
    counts = re.findall(r"(\d+) tokens reused, (\d+) encoded", done.stdout)
    assert len(counts) == CALLS[name]
    # Messages are longer than what asks about them; nothing of them is encoded by a call.
    assert all(int(reused) > int(encoded) for reused, encoded in counts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["debate", "rag"])
def test_text_and_exact_mode_answer_alike(name: str, embedded_model_path: Path) -> None:
    """Token by token."""
    words = [f"examples/{name}.py", "--model", str(embedded_model_path), "--max-tokens", "6"]
    said = [
        re.sub(r"  \d+ tokens reused.*", "", subprocess.run(
            [sys.executable, *words, "--mode", mode],
            capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout)
        for mode in ("baseline", "exact")
    ]  # fmt: skip
    assert said[0].strip() and said[0] == said[1]


@pytest.mark.exhaustive
def test_the_notebook_runs() -> None:
    """Every cell, in a kernel of its own; its cells assert what they claim."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("reused_tokens" in str(output) for output in shown)
    assert not [output for output in shown if output["output_type"] == "error"]


def test_examples_are_short_and_listed() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"examples/{path.name}" in page
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path.name
