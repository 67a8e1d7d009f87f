# SPDX-License-Identifier: Apache-2.0
"""How much of the package is typed: annotations that are `Any` alone, package by package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_choreo"
# What is left, each for a reason: an operation of the engine answers whatever it answers (api),
# what comes through Ray is whatever was sent (cluster),
# fields of pydantic and a module chosen at run time (integrations), JSON of any form and
# options of metrics (server), a kernel of Triton (ops), a file of JSON (repair), forms of msgspec
# (convert.py), arguments
# that methods of vLLM get from us as we got them (engine), what workers of one kind hand to one
# another and a facade whose methods are coroutines or not (planner).
MOST = {
    **dict.fromkeys(("chat", "client", "pml", "semantics", "snapshot", "store", "wire"), 0),
    **dict.fromkeys(("cli", "fleet", "lab", "transcript"), 0),
    **{"": 5, "api": 2, "integrations": 3, "repair": 1, "server": 4, "engine": 38, "testing": 8},
    "cluster": 3,
    "ops": 1,
    "planner": 8,
}


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def _num_any(path: Path) -> int:
    """Parameters, results and fields of a file whose whole annotation is `Any`."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count += _is_any(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            count += _is_any(node.annotation)
    return count


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        package, *below = path.relative_to(PACKAGE).parts
        found[package if below else ""] += _num_any(path)
    return found


@pytest.mark.parametrize("package", MOST)
def test_no_more_is_any(package: str, counts: Counter[str]) -> None:
    assert counts[package] <= MOST[package]


def test_every_package_has_a_bar(counts: Counter[str]) -> None:
    assert set(counts) == set(MOST)
