# SPDX-License-Identifier: Apache-2.0
"""Outputs are compared before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_choreo.testing.laws import largest

TOLERANCE = 1e-3  # of log-probabilities in float32


def logprobs_of(generated: Iterable[Any], token: int) -> list[float]:
    """Of a forced token, step by step, as the model gave them before anything was forced.

    Args:
        generated: the `logprobs` of vLLM's outputs: per step, entries by token.
    """
    return [step[token].logprob for step in generated]


def require_alike(name: str, ours: Iterable[float], theirs: Iterable[float]) -> None:
    """Raises SystemExit: log-probabilities of what should be the same differ."""
    worst = largest(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{name}: log-probabilities within {worst:.1e}", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(f"{name}: the sides differ by {worst}: nothing timed")
