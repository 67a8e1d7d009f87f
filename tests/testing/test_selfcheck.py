# SPDX-License-Identifier: Apache-2.0
"""The self-check of an installation: its table, its status, and the command of docs/testing.md."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

from vllm_choreo.testing import selfcheck
from vllm_choreo.testing.laws import LAWS, difference

DOCS = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")


def test_a_law_that_does_not_hold_is_told_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    laws: dict[str, Callable[[], Iterable[float]]] = {
        "good": lambda: [1e-6, 4e-5],
        "off": lambda: [1e-6, 6e-4],
        "other": lambda: [0.0, math.inf],
        "empty": lambda: [],
        "no numbers": lambda: [0.0, math.nan, 1e-6],
    }
    assert selfcheck.report(laws) == 4
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["good", "4.0e-05", "ok"],
        ["off", "6.0e-04", "BROKEN"],
        ["other", "other", "tokens", "BROKEN"],
        ["empty", "other", "tokens", "BROKEN"],
        ["no", "numbers", "other", "tokens", "BROKEN"],
    ]


def test_answers_that_are_no_numbers_are_not_alike() -> None:
    def answer(logprob: float) -> CompletionOutput:
        entries = {token: Logprob(logprob) for token in range(5)}
        return CompletionOutput(0, "", [0, 0], None, [entries, entries])

    assert difference(answer(-1.0), answer(-1.5)) == 0.5
    assert difference(answer(math.nan), answer(math.nan)) == math.inf


def test_packages_of_another_build_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pip may install beside a torch for CPUs: transformers does not load then."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no nms')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert selfcheck.main([]) == 1
    said = capsys.readouterr().out
    assert "transformers does not load: torchvision;" in said
    assert said.rstrip().endswith("pip uninstall --yes torchvision")


@pytest.mark.parametrize(("num_broken", "said"), [(0, "all laws hold"), (2, "2 laws do not hold")])
def test_the_status_tells_whether_all_hold(
    num_broken: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(selfcheck, "_check", lambda model, folder: num_broken)
    assert selfcheck.main([]) == min(num_broken, 1)
    facts, last = capsys.readouterr().out.splitlines()
    assert facts.startswith("vllm-choreo ") and "kernels: " in facts and last == said


@pytest.mark.exhaustive  # a process of its own
@pytest.mark.slow
def test_the_command_of_the_page_shows_what_the_page_shows() -> None:
    (command,) = re.findall(r"^python -m vllm_choreo\.testing\.selfcheck$", DOCS, re.MULTILINE)
    words = [sys.executable, *shlex.split(command)[1:]]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-3000:]
    (table,) = re.findall(r"```text\n(vllm-choreo.*?)```", DOCS, re.DOTALL)
    documented, given = table.splitlines(), shown.stdout.splitlines()
    assert [row.split()[0] for row in documented] == [row.split()[0] for row in given]
    assert [row.split()[0] for row in given if row.endswith("  ok")] == [*LAWS, "oracle"]
