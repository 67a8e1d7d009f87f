# SPDX-License-Identifier: Apache-2.0
"""The house of the benchmarks: who imports whom."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from benchmarks.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, of the benchmarks and of the tests."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inner if name in FILES]
            found.update(modules if len(modules) == len(inner) else [*modules, node.module])
    return {name for name in found if name.partition(".")[0] in ("benchmarks", "tests")}


IMPORTS = {name: _imports(path) for name, path in FILES.items()}
PROGRAMS = {name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text()}


def test_no_program_is_imported_nor_a_test() -> None:
    # A child process is a program too, but what it is asked by is not.
    programs = PROGRAMS - {"benchmarks.harness.child"}
    for name, imported in IMPORTS.items():
        assert not imported & programs, name
        assert not any(other.startswith("tests") for other in imported), name


def test_imports_run_one_way() -> None:
    list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    for name, imported in IMPORTS.items():
        if name.startswith("benchmarks.harness"):
            assert all(other.startswith("benchmarks.harness") for other in imported), name


def test_a_question_imports_no_other_question() -> None:
    for name, imported in IMPORTS.items():
        folder = name.split(".")[1] if name.count(".") > 1 else ""
        if folder:
            folders = {other.split(".")[1] for other in imported if other.count(".")}
            assert folders <= {folder, "harness"}, name


def test_commands_are_programs() -> None:
    for commands in COMMANDS.values():
        for command in commands:
            program = command.split()[0]
            assert {program, f"{program}.__main__"} & PROGRAMS, command


def test_files_are_short() -> None:
    for name, path in FILES.items():
        assert len(path.read_text().splitlines()) <= 350, name
