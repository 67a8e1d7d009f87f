# SPDX-License-Identifier: Apache-2.0
"""Distributions that a worker captures for the program that asked, where both are one process.

    SamplingParams(extra_args={"forced_tokens": [17, 4], "kept_as": "run 3"}, max_tokens=2)
    take("run 3")      float32 [2, vocab_size], once

Full vocabularies as vLLM's log-probabilities take a hundred times as long as the tokens themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

KEY = "kept_as"

_captured: dict[str, dict[int, np.ndarray]] = {}


def expect(name: str) -> dict[str, Any]:
    """Expect the distributions of a forced request under a name; returns its `extra_args` entry."""
    _captured[name] = {}
    return {KEY: name}


def capture(name: str, position: int, logprobs: np.ndarray) -> None:
    """Capture the distribution at a token, the first generated one at 0; the latest one counts.

    A chunk of a prompt gives a distribution that is never sampled from. Names that nobody expects,
    which a stranger's request may hold, capture nothing.

    Args:
        logprobs: natural log-probabilities, float32 [vocab_size].
    """
    if name in _captured:
        _captured[name][position] = logprobs


def take(name: str) -> np.ndarray:
    """Take what was captured: float32 [num_tokens, vocab_size], the tokens in order.

    Raises:
        KeyError: the name was not expected.
    """
    found = _captured.pop(name)
    if not found:
        return np.empty((0, 0), dtype=np.float32)
    return np.stack([found[position] for position in sorted(found)])
