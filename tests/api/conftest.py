# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests with engines of a few lines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.fakes import make_llm, record_operations
from vllm_choreo import Choreography


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine operations are recorded by the fake engine."""
    record_operations(monkeypatch)


@pytest.fixture
def llm() -> Any:
    return make_llm()


@pytest.fixture
def c(llm: Any) -> Choreography:
    return Choreography(llm)
