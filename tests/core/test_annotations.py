# SPDX-License-Identifier: Apache-2.0
"""How much of the package is typed: annotations that are `Any` alone, package by package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_choreo"
# What is left, each for a reason: an operation of the engine answers whatever it answers (api),
# fields of pydantic and a module chosen at run time (integrations), JSON of any form and
# options of metrics (server), what workers of one kind hand to one another and a facade whose
# methods are coroutines or not (planner).
MOST = {
    **dict.fromkeys(("", "client", "ops", "semantics", "snapshot", "store", "wire"), 0),
    **{"api": 2, "integrations": 5, "server": 4, "engine": 160, "planner": 8},
}
MOST_OF_ALL_OTHERS = 252


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


def test_no_more_is_any_in_all_others(counts: Counter[str]) -> None:
    others = {package: count for package, count in counts.items() if package not in MOST}
    assert sum(others.values()) <= MOST_OF_ALL_OTHERS, others
