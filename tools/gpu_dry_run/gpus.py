# SPDX-License-Identifier: Apache-2.0
"""GPUs that a dry run pretends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """
    Attributes:
        capability: major and minor number.
        num_multiprocessors: streaming multiprocessors.
        memory_gib: device memory.
    """

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_gib: int


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 48),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 32),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 180),
    "t4": Gpu("Tesla T4", (7, 5), 40, 16),
}
