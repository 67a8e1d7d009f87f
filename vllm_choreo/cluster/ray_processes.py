# SPDX-License-Identifier: Apache-2.0
"""Processes of Ray's, as a fleet needs them: with their share of the processor.

Ray gives its workers the niceness 15, so that tasks leave a node's other processes alone. An
engine, an ingress or Serve's proxy is such a worker: beside a process of niceness 0 that computes,
it gets 3 % of a core, and no request is answered in minutes.
"""

from __future__ import annotations

import os

from vllm.logger import init_logger

logger = init_logger("vllm.choreo.cluster")

_NICENESS = "RAY_worker_niceness"
_RAYS_NICENESS = 15


def start_ray(num_cpus: int, **options: object) -> None:
    """Start Ray on this machine, with workers that are as nice as this process.

    Whatever clusters run here already are left alone.

    Args:
        num_cpus: CPUs that it is told of.
        options: options of `ray.init`.
    """
    import ray

    os.environ.setdefault(_NICENESS, "0")
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)


def warn_of_niceness() -> None:
    """Say so if this process gets what others leave of the processor."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness >= _RAYS_NICENESS:
        logger.warning(
            "this process has the niceness %d, and gets hardly anything of a core on which others "
            "compute: start Ray's nodes with %s=0 in their environment",
            niceness,
            _NICENESS,
        )
