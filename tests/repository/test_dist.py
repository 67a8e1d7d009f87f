# SPDX-License-Identifier: Apache-2.0
"""What strangers install: one version, a wheel that proves itself, and no need of a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import vllm_choreo
from tools.dist import build, has_kernels
from vllm_choreo.server.playground.routes import FILES
from vllm_choreo.testing.laws import LAWS

ROOT = Path(__file__).parents[2]
# As another shell has it: nothing of this checkout is found by accident.
PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_version_stands_in_one_place() -> None:
    assert version("vllm-choreo") == vllm_choreo.__version__
    assert '\nversion = "' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("make dist", "-m tools.dist"),
        ("make check-vllm VERSION=latest", "-m tools.vllm_check latest"),
    ],
)
def test_commands_of_the_page_are_those_of_the_makefile(command: str, module: str) -> None:
    assert f"`{command}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True)
    assert module in shown.stdout.decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel."""
    return build(tmp_path_factory.mktemp("dist"))


def _bare_environment(folder: Path, wheel: Path) -> Path:
    """A venv with this wheel, and vLLM and the rest from where the tests have them; its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True, env=PLAIN)
    # A line in a .pth file is a folder to look into last; the .pth files there are not read, so
    # that a checkout installed there is not found.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@pytest.mark.exhaustive  # compiles the kernels
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_proves_itself_in_a_bare_environment(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    _, wheel = built
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_\d+_\d+_x86_64", wheel.name)
    python = _bare_environment(tmp_path / "venv", wheel)
    command = [str(python), "-m", "vllm_choreo.testing.selfcheck"]
    shown = subprocess.run(command, cwd=tmp_path, env=PLAIN, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-3000:]
    facts, *rows = shown.stdout.splitlines()
    assert facts.startswith(f"vllm-choreo {vllm_choreo.__version__}, vLLM ")
    if not torch.cuda.is_available():
        assert "kernels: C++, " in facts
    assert [row.split()[0] for row in rows if row.endswith("  ok")] == [*LAWS, "oracle"]
    assert rows[-1] == "all laws hold"
    where = "import vllm_choreo, vllm_choreo._C as c; print(vllm_choreo.__file__, c.__file__)"
    found = subprocess.run(
        [str(python), "-c", f"import torch; {where}"], cwd=tmp_path, env=PLAIN, capture_output=True
    )
    assert found.stdout.decode().count(str(tmp_path / "venv")) == 2, found


@pytest.mark.exhaustive  # with the one above
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_have_all_files(built: tuple[Path, Path]) -> None:
    source, wheel = built
    assert vllm_choreo.__version__ in source.name and vllm_choreo.__version__ in wheel.name
    listed = subprocess.run(
        ["git", "ls-files", "vllm_choreo", "csrc"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in listed if name.startswith("vllm_choreo/")} <= names
    assert {f"vllm_choreo/server/playground/{name}" for name in FILES} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "csrc/"))]
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {*listed, "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= packed


@pytest.mark.exhaustive  # with those above
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C++ compiler 'no-such-compiler'"),
        ("/bin/false", "'/bin/false' does not run"),
        ("{folder}/no-program", "/no-program' does not run"),
    ],
)
def test_it_is_installed_without_a_compiler_that_works(
    built: tuple[Path, Path], tmp_path: Path, compiler: str, reason: str
) -> None:
    source, _ = built
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    (folder / "no-program").write_bytes(b"\0")
    (folder / "no-program").chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path / "out"), str(folder)],
        env={**PLAIN, "CXX": compiler.format(folder=folder)},
        capture_output=True,
        text=True,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-3000:]
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert not has_kernels(wheel)
    assert reason in told and "GPUs do without them. For CPUs install g++" in told
