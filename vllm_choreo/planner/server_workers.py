# SPDX-License-Identifier: Apache-2.0
"""Former path of `vllm_choreo.planner.workers.server`."""

import warnings

from vllm_choreo.planner.workers.server import server_workers

__all__ = ["server_workers"]
warnings.warn(
    "import server_workers from vllm_choreo.planner.workers.server",
    DeprecationWarning,
    stacklevel=2,
)
