# SPDX-License-Identifier: Apache-2.0
"""The plan of the package: which room may import which."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. A room imports those that are named with it, `errors`, and itself.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "convert": set(),
    "config": {"convert"},
    "files": set(),
    "trained_adapter": {"files"},
    "repair": {"convert", "files", "trained_adapter"},
    "semantics": {"repair"},
    "ops": set(),
    "smallmodel": set(),
    "auto": set(),
    "store": {"semantics", "repair"},
    "engine": {"config", "semantics"},
    "engine.scheduler": {"config", "semantics", "repair", "store", "engine"},
    "engine.worker": {"config", "ops", "engine"},
    "wire": {"semantics"},
    "snapshot": {"semantics", "wire", "trained_adapter"},
    "api": {"config", "repair", "semantics", "engine", "trained_adapter", "auto", "snapshot"},
    "pml": {"semantics", "api"},
    "client": {"repair", "semantics", "wire", "api", "pml"},
    "integrations": set(),
    "workflows.problems": set(),
    "workflows.record": {"convert", "semantics", "wire", "api", "files", "trained_adapter"},
    "workflows": {"semantics", "api", "workflows.record", "workflows.problems"},
    "judge": {"semantics", "api", "engine"},
    "planner": {"semantics", "api", "client", "files"},
    "show": {"semantics", "workflows.record"},
    "train": {"semantics", "ops", "workflows.record", "files", "trained_adapter"},
    "server": {
        *("config", "repair", "semantics", "wire", "api", "engine", "show"),
        *("workflows.record", "pml", "auto", "snapshot"),
    },
    "cli": {
        *("semantics", "api", "client", "ops", "show", "smallmodel", "engine", "wire"),
        *("judge", "repair", "trained_adapter"),
        *("workflows", "workflows.record", "workflows.problems"),
        *("files", "train", "trained_adapter", "pml", "auto", "snapshot"),
    },
}
# The two processes of an engine meet in `engine` alone; what runs in neither stays out of both.
NESTED = {room for room in ROOMS if "." in room}


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


def _room(module: str) -> str:
    """The room that a module, or a name in one, is in; "" for the package itself."""
    parts = module.split(".")[1:]
    nested = ".".join(parts[:2])
    return nested if nested in NESTED else (*parts, "")[0]


def test_imports_run_one_way() -> None:
    wrong = []
    for path in _sources("vllm_choreo"):
        here = _room(_module(path))
        for name in _imports(path, "vllm_choreo"):
            there = _room(name)
            # Public names of the package, as programs import them.
            if there not in ROOMS or not here:
                continue
            if there not in ROOMS[here] | {here, "errors"}:
                wrong.append(f"{_module(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_room_is_on_the_plan() -> None:
    found = {_room(_module(path)) for path in _sources("vllm_choreo")} - {""}
    assert found == set(ROOMS)


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


def test_one_name_for_one_class() -> None:
    classes = Counter(
        node.name
        for path in _sources("vllm_choreo")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_every_room_says_what_it_is_for() -> None:
    for path in _sources("vllm_choreo"):
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), f"{path} has no docstring"
