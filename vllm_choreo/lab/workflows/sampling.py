# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of calls that run in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from vllm import SamplingParams

# What calls sample with: on a server a dict of fields, and None what the engine is set to.
Sampling: TypeAlias = "SamplingParams | Mapping[str, Any] | None"

_SEEDS_PER_RUN = 1000  # so that runs with neighbouring seeds share none


def seeded(sampling_params: Sampling, number: int) -> Sampling:
    """The same sampling with a seed of its own, so that equal calls do not all say the same.

    Args:
        sampling_params: `vllm.SamplingParams`, a dict of their fields for a server, or None;
            without a seed they are left as they are, for then every call is random by itself.
        number: number of the call in its workflow, less than 1000.
    """
    if isinstance(sampling_params, Mapping):
        seed = sampling_params.get("seed")
        return sampling_params if seed is None else {**sampling_params, "seed": _seed(seed, number)}
    if sampling_params is None or sampling_params.seed is None:
        return sampling_params
    clone = sampling_params.clone()
    clone.seed = _seed(sampling_params.seed, number)
    return clone


def _seed(seed: int, number: int) -> int:
    return seed * _SEEDS_PER_RUN + number
