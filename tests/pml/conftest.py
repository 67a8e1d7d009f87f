# SPDX-License-Identifier: Apache-2.0
"""The tiny models, oracles and engines of the engine tests serve here too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import _one_thread, engine_slot, plain_llama, tiny_oracle

__all__ = ["_one_thread", "c", "engine_slot", "plain_llama", "tiny_oracle"]


@pytest.fixture
def c(llm: Any) -> Iterator[Any]:
    """A session on the engine of the test's own file."""
    from vllm_choreo import Choreography

    with Choreography(llm) as session:
        yield session
