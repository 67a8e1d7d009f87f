# SPDX-License-Identifier: Apache-2.0
"""The engines of the engine tests serve here too, and what a server of a module has around it: a
client, and its log where a test fails."""

from tests.engine.conftest import _one_thread, engine_slot, plain_llama, tiny_oracle
from tests.server.conftest import alpha, pytest_runtest_makereport

__all__ = [
    "_one_thread",
    "alpha",
    "engine_slot",
    "plain_llama",
    "pytest_runtest_makereport",
    "tiny_oracle",
]
