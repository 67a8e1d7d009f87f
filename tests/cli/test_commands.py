# SPDX-License-Identifier: Apache-2.0
"""Subcommands are found by entry points, ours and those of other packages alike."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_choreo.cli import commands, main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = PROJECT["entry-points"][commands.GROUP]
PAGE = (ROOT / "docs/commands.md").read_text(encoding="utf-8")


def _with(monkeypatch: pytest.MonkeyPatch, **added: str) -> None:
    """Let these be installed beside ours."""
    found = {**OURS, **added}
    points = [EntryPoint(name, value, commands.GROUP) for name, value in found.items()]
    monkeypatch.setattr(commands, "entry_points", lambda group: points)


def test_all_of_ours_load_and_have_a_line_of_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch)
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    listed = capsys.readouterr().out
    assert "cannot be loaded" not in listed
    for name in OURS:
        assert re.search(rf"^    {name}\s+\w", listed, re.MULTILINE), name


def test_help_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_choreo.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_page_adds_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "greeting.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    _with(monkeypatch, **tomllib.loads(project)["project"]["entry-points"][commands.GROUP])
    assert main.main(["greet", "Anna"]) == 0
    assert capsys.readouterr().out == "Hello, Anna.\n"


def test_one_that_is_broken_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch, broken="no_such_package.cli:command")
    with pytest.raises(SystemExit):
        main.main(["--help"])
    listed = " ".join(capsys.readouterr().out.split())
    assert "doctor check on this machine" in listed
    assert "(cannot be loaded: No module named 'no_such_package')" in listed
    assert main.main(["dashboard"]) == 0


def test_ours_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("doctor", value, commands.GROUP)
        for value in (OURS["doctor"], "zealous.cli:command", "another.cli:command")
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: points)
    assert commands.find_commands()["doctor"].value == OURS["doctor"]


def test_nothing_installed_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert "No command is installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "package, advice",
    [
        ("peft", "run `pip install 'vllm-choreo[lab]'`"),
        ("ray", "run `pip install 'vllm-choreo[planner]'`"),
        ("httpx", "run `pip install 'vllm-choreo[client]'`"),
        ("vllm", "install vllm==0.32.0 (GPU), or the CPU build"),
        ("fsspec", "run `pip install fsspec`"),
    ],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    advice: str,
) -> None:
    def run(args: Any) -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    _with(monkeypatch)
    monkeypatch.setattr(main, "_parser", lambda argv: _Parser(run))
    assert main.main(["doctor"]) == 1
    assert f"vllm-choreo: {package} is missing: {advice}" in capsys.readouterr().err


def test_a_module_that_no_extra_brings_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        raise ModuleNotFoundError(
            "No module named 'vllm_choreo.nothing'", name="vllm_choreo.nothing"
        )

    monkeypatch.setattr(main, "_parser", lambda argv: _Parser(run))
    with pytest.raises(ModuleNotFoundError):
        main.main(["doctor"])


class _Parser:
    """A parser whose one command does as `run`."""

    def __init__(self, run: Any) -> None:
        requires = [
            f"{requirement}; extra == '{extra}'"
            for extra, requirements in PROJECT["optional-dependencies"].items()
            for requirement in requirements
        ]
        distribution = SimpleNamespace(name=PROJECT["name"], requires=requires)
        self._args = SimpleNamespace(main=run, point=SimpleNamespace(dist=distribution))

    def parse_args(self, argv: Any) -> SimpleNamespace:
        return self._args


def test_old_extras_mean_the_new_ones() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras["demo"] == extras["train"] == ["vllm-choreo[lab]"]
    assert extras["ray"] == ["vllm-choreo[planner]"]
