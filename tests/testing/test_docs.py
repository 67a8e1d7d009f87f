# SPDX-License-Identifier: Apache-2.0
"""docs/testing.md: its examples run as they stand, and its names are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import stop_engine
from vllm_choreo import testing

DOCS = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
IN_PROCESS, FIXTURE = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def test_the_example_runs() -> None:
    scope: dict[str, Any] = {}
    try:
        exec(compile(IN_PROCESS, "docs/testing.md", "exec"), scope)
    finally:
        if "llm" in scope:
            stop_engine(scope["llm"])
    assert len(scope["generated"]) == 8


@pytest.mark.exhaustive  # a server of its own
def test_the_fixture_serves(tmp_path_factory: pytest.TempPathFactory) -> None:
    scope: dict[str, Any] = {}
    exec(
        compile(FIXTURE.replace("@pytest.fixture", "# @pytest.fixture"), "testing.md", "exec"),
        scope,
    )
    make: Callable[[Any], Any] = scope["server"]
    (running,) = make(tmp_path_factory)
    assert running.process.poll() is not None, "it has been ended"
    assert "Application startup complete" in running.log_tail(10_000)


def test_all_that_the_package_names_is_there_and_told() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
        assert f"`{name}" in DOCS or f"{name}(" in DOCS
    with pytest.raises(AttributeError, match="nothing"):
        _ = testing.nothing
