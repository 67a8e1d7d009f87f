# SPDX-License-Identifier: Apache-2.0
"""The tiny models, oracles and engines of the engine tests serve here too."""

from tests.engine.conftest import _one_thread, engine_slot, plain_llama, tiny_oracle

__all__ = ["_one_thread", "engine_slot", "plain_llama", "tiny_oracle"]
