# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on CPU, where vLLM turns it off though it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Within, engines that start plan each step before the one before it has been sampled."""
    import vllm_choreo

    vllm_choreo.register()
    from vllm.platforms import current_platform

    from vllm_choreo.engine.plugin import configure_after

    platform = type(current_platform)
    configure = platform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        configure_after(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        platform.check_and_update_config = configure
