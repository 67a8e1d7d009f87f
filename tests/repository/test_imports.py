# SPDX-License-Identifier: Apache-2.0
"""The plan of the project: which package may import which."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. A package imports those that are named with it, `errors`, and itself.
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "moved": set(),
    "convert": set(),
    "config": {"convert"},
    "files": set(),
    "kv_dtype": set(),
    "memory_changes": set(),
    "trained_adapter": {"files"},
    "repair": {"convert", "files", "trained_adapter"},
    "semantics": {"repair", "trained_adapter"},
    "ops": set(),
    "chat": set(),
    "store": {"semantics", "repair", "memory_changes"},
    "fleet": set(),
    "engine": {
        *("config", "semantics", "kv_dtype", "memory_changes", "trained_adapter", "snapshot"),
    },
    "engine.scheduler": {
        *("config", "semantics", "repair", "store", "engine", "kv_dtype", "memory_changes"),
    },
    "engine.worker": {"config", "ops", "engine", "kv_dtype", "memory_changes"},
    "wire": {"semantics"},
    "transcript": {"convert", "semantics", "wire"},
    "snapshot": {"semantics", "wire", "trained_adapter", "kv_dtype"},
    "api": {
        *("config", "repair", "semantics", "engine", "trained_adapter", "chat", "snapshot"),
        "fleet",
    },
    "client": {"repair", "semantics", "wire", "api", "chat"},
    "integrations": set(),
    "testing": {"semantics", "integrations", "ops"},
    "server": {
        *("config", "repair", "semantics", "wire", "api", "engine", "transcript"),
        *("chat", "snapshot", "trained_adapter"),
    },
    "cli": {
        *("semantics", "repair", "api", "client", "ops", "engine", "testing"),
        *("chat", "snapshot"),
    },
    # Wings: nothing above imports them, and none imports another.
    "pml": {"pml.language", "pml.client", "semantics", "api", "client", "cli", "testing"},
    "pml.language": {"chat"},
    "pml.client": {"pml", "pml.language", "semantics", "wire", "client"},
    "pml.server": {"pml", "pml.language", "semantics", "wire", "api", "server"},
    "cluster": {
        *("config", "semantics", "engine", "api", "server", "integrations", "cli", "snapshot"),
    },
    "planner": {"convert", "chat", "semantics", "api", "client", "files", "fleet"},
    "lab": set(),
    "lab.problems": set(),
    "lab.workflows": {"chat", "semantics", "api", "transcript", "lab.problems"},
    "lab.record": {"semantics", "api", "transcript", "files", "trained_adapter"},
    "lab.train": {
        *("semantics", "ops", "transcript", "files", "trained_adapter", "lab.record", "chat"),
    },
    "lab.report": {"semantics", "transcript"},
    "lab.cli": {
        *("repair", "semantics", "transcript", "api", "cli", "files", "testing"),
        *("trained_adapter", "lab.problems", "lab.record", "lab.report", "lab.train"),
        *("lab.workflows", "client"),
    },
    "lab.study": {
        *("repair", "semantics", "transcript", "api", "engine", "cli", "files", "testing"),
        *("trained_adapter", "lab.problems", "lab.record", "lab.report", "lab.workflows"),
        *("lab.cli", "client"),
    },
}
# The two processes of an engine meet in `engine` alone; what runs in neither stays out of both.
NESTED = {package for package in PACKAGES if "." in package}
WINGS = {"cluster", "planner", "pml", "lab"}


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, package: str) -> Iterator[str]:
    """The modules of `package` that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == package)


def _package(module: str) -> str:
    """The package that a module, or a name in one, is in; "" for `vllm_choreo` itself."""
    parts = module.split(".")[1:]
    nested = ".".join(parts[:2])
    return nested if nested in NESTED else (*parts, "")[0]


def test_imports_run_one_way() -> None:
    wrong = []
    for path in _sources("vllm_choreo"):
        here = _package(_module(path))
        for name in _imports(path, "vllm_choreo"):
            there = _package(name)
            # Public names of the package, as programs import them.
            if there not in PACKAGES or not here:
                continue
            if there not in PACKAGES[here] | {here, "errors"}:
                wrong.append(f"{_module(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_a_wing_is_imported_by_itself_alone() -> None:
    """The table says it of imports; commands and routes of wings are found by entry points."""
    for package, imported in PACKAGES.items():
        wings = {name.partition(".")[0] for name in imported} & WINGS
        assert wings <= {package.partition(".")[0]}, package


def test_every_package_is_on_the_plan() -> None:
    found = {_package(_module(path)) for path in _sources("vllm_choreo")} - {""}
    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", ["vllm_choreo", "benchmarks"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    modules = {_module(path): path for path in _sources(package)}
    faces = {_module(path) for path in _sources(package) if path.name == "__init__.py"}
    edges: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        for name in _imports(path, package):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target not in faces and target != module:
                edges[module].add(target)
    while free := [m for m in modules if m in edges and not (edges[m] & edges.keys())]:
        for module in free:
            del edges[module]
    assert not edges, {module: sorted(targets) for module, targets in edges.items()}


def test_benchmarks_import_neither_tests_nor_programs() -> None:
    for path in _sources("benchmarks"):
        assert not list(_imports(path, "tests")), path
    for path in _sources("vllm_choreo"):
        assert not [*_imports(path, "tests"), *_imports(path, "benchmarks")], path


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    # Its schedules are those of a benchmark, too.
    allowed = {ROOT / "tests/planner/test_schedule.py"}
    for path in _sources("tests"):
        if path.parent.name != "benchmarks" and path not in allowed:
            assert not list(_imports(path, "benchmarks")), path


def test_one_name_for_one_class() -> None:
    classes = Counter(
        node.name
        for path in _sources("vllm_choreo")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_every_package_says_what_it_is_for() -> None:
    for path in _sources("vllm_choreo"):
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), f"{path} has no docstring"
