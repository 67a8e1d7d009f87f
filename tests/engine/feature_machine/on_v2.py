# SPDX-License-Identifier: Apache-2.0
"""Processes whose engines have vLLM's model runner V2; nothing here imports vLLM before that."""

from __future__ import annotations

from typing import Any


def work_on_v2(*arguments: Any) -> None:
    """Run what is asked for, see `soak.work`."""
    from tests.engine.interpreted_tests import run_v2_on_cpu

    run_v2_on_cpu()
    from tests.engine.feature_machine.soak import work

    work(*arguments)
