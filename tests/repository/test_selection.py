# SPDX-License-Identifier: Apache-2.0
"""`--no-skips` and `--all`: what CI asks of the tests, on tests made for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_MODULES = {
    "marked": '@pytest.mark.skipif(True, reason="no Chromium")\ndef test_it():\n    pass\n',
    "inside": 'def test_it():\n    pytest.skip("no Chromium")\n',
    "module": 'pytest.skip("no Chromium", allow_module_level=True)\n',
    "fixture": """
@pytest.fixture
def browser():
    pytest.skip("no Chromium")

def test_it(browser):
    pass
""",
}
_OTHERS = """
@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(3))
def test_grid(n):
    pass

@pytest.mark.nightly
def test_more():
    pass

@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    assert False
"""
_GPU = "@pytest.mark.gpu\ndef test_it():\n    pass\n"


def _run(folder: Path, modules: dict[str, str], *options: str) -> str:
    """What pytest says of made modules, on one line."""
    for name, text in modules.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{text}")
    markers = "\n    ".join(("gpu", "exhaustive", "nightly"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n    {markers}\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.selection", "-q", "-rfE", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    return f"{done.stdout}\nstatus {done.returncode}"


@pytest.mark.exhaustive
def test_a_skip_fails_where_none_is_allowed(tmp_path: Path) -> None:
    modules = {**_MODULES, "others": _OTHERS}
    allowed = _run(tmp_path, modules)
    assert "4 skipped, 4 deselected, 1 xfailed" in allowed and "status 0" in allowed
    # An error at collection ends the run before any test; hence without that module for the rest.
    refused = _run(tmp_path, modules, "--no-skips", "--ignore=test_module.py")
    assert "4 deselected, 1 xfailed" in refused and "status 1" in refused
    assert "1 failed" in refused and "2 errors" in refused
    assert refused.count("--no-skips: Skipped: no Chromium") >= 3
    module = _run(tmp_path, modules, "--no-skips", "test_module.py")
    assert "--no-skips: Skipped: no Chromium" in module and "status 2" in module


def test_grids_run_when_all_tests_are_asked_for_and_a_missing_gpu_may_skip(tmp_path: Path) -> None:
    done = _run(tmp_path, {"others": _OTHERS, "gpu": _GPU}, "--all", "--no-skips")
    has_gpu = torch.cuda.is_available()
    gpu = "4 passed" if has_gpu else "3 passed, 1 skipped"
    assert f"{gpu}, 1 deselected, 1 xfailed" in done and "status 0" in done


@pytest.mark.exhaustive
def test_what_is_for_the_night_runs_when_it_is_asked_for(tmp_path: Path) -> None:
    done = _run(tmp_path, {"others": _OTHERS}, "--nightly")
    assert "4 passed, 1 xfailed" in done and "status 0" in done


@pytest.mark.exhaustive
def test_a_test_that_is_not_run_must_find_its_fixtures(tmp_path: Path) -> None:
    wrong = "@pytest.mark.exhaustive\ndef test_it(tmp_path, nobodys):\n    pass\n"
    done = _run(tmp_path, {"wrong": wrong})
    assert "test_it asks for unknown fixtures: {'nobodys'}" in done and "status 2" in done


@pytest.mark.exhaustive
def test_a_process_is_ended_no_sooner_than_its_test_may_take(tmp_path: Path) -> None:
    module = "import time\n{}def test_it():\n    time.sleep(3)\n    print('awake')\n"
    ended = ("-s", "-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true")
    for mark, is_ended in (("", True), ("@pytest.mark.timeout(60)\n", False)):
        done = _run(tmp_path, {"sleeper": module.format(mark)}, *ended)
        assert ("awake" in done, "status 0" in done) == (not is_ended,) * 2, done


@pytest.mark.exhaustive
def test_a_file_is_divided_only_if_its_tests_share_nothing(tmp_path: Path) -> None:
    """Processes of pytest-xdist tell which of them ran each test."""
    module = """
import os

@pytest.mark.parametrize("n", range(4))
def test_it(n, request):
    name = f"{request.path.stem}-{os.environ['PYTEST_XDIST_WORKER']}"
    request.path.with_name(name).touch()
"""
    sides = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")  # as `make test`
    assert "8 passed" in _run(tmp_path, {"gpu_path": module, "whole": module}, *sides)
    assert len([*tmp_path.glob("test_gpu_path-gw*")]) == 2
    assert len([*tmp_path.glob("test_whole-gw*")]) == 1
