# SPDX-License-Identifier: Apache-2.0
"""How docstrings begin: with a verb or a noun phrase, and lines of arguments with a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "vllm_choreo").rglob("*.py"))
_FRAGMENTS = {"What", "Of", "As", "See", "Those", "Whether"}
_DANGLING = {"of", "what", "that"}
_SECTIONS = {"Args:", "Attributes:"}
_NAMES = re.compile(r"[\w*]+(, [\w*]+)*: ")


def _docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield found


def _arguments(docstring: str) -> Iterator[str]:
    """Lines of its sections of arguments that name one: `name: text`."""
    is_inside = False
    for line in docstring.splitlines():
        text = line.strip()
        if text.endswith(":") and text[:1].isupper() and " " not in text:
            is_inside = text in _SECTIONS
        elif is_inside and _NAMES.match(text):
            yield text


@pytest.mark.parametrize("package", sorted({path.parent for path in SOURCES}), ids=lambda p: p.name)
def test_docstrings_begin_with_a_verb_or_a_noun(package: Path) -> None:
    wrong = []
    for path in sorted(package.glob("*.py")):
        for docstring in _docstrings(path):
            first = docstring.split(maxsplit=1)[0].strip(".,:`")
            if first in _FRAGMENTS:
                wrong.append(f"{path.name}: {docstring.splitlines()[0]}")
            for line in _arguments(docstring):
                if line.partition(": ")[2].split(maxsplit=1)[0].lower() in _DANGLING:
                    wrong.append(f"{path.name}: {line}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_finds_fragments() -> None:
    docstring = "Count.\n\nArgs:\n    name: of the message.\n    size: tokens that it has.\n"
    assert [*_arguments(docstring)] == ["name: of the message.", "size: tokens that it has."]
