# SPDX-License-Identifier: Apache-2.0
"""Former path of `vllm_choreo.planner.workers.ray`."""

import warnings

from vllm_choreo.planner.workers.ray import ray_workers

__all__ = ["ray_workers"]
warnings.warn(
    "import ray_workers from vllm_choreo.planner.workers.ray", DeprecationWarning, stacklevel=2
)
