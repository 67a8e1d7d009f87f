# SPDX-License-Identifier: Apache-2.0
"""The tiny models, oracles and engines of the engine tests serve here too; programs may be run."""

import pytest

from tests.engine.conftest import _one_thread, engine_slot, plain_llama, tiny_oracle
from vllm_choreo.lab.problems.programs import CONSENT

__all__ = ["_one_thread", "engine_slot", "plain_llama", "tiny_oracle"]


@pytest.fixture(autouse=True)
def _consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow that what tiny models answer is run as a program."""
    monkeypatch.setenv(CONSENT, "1")
