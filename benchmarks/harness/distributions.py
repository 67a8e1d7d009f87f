# SPDX-License-Identifier: Apache-2.0
"""Distributions over the whole vocabulary, of tokens that an engine is made to generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.engine import FORCED

# What the engine must be started with.
ENGINE_OPTIONS: dict[str, Any] = {
    "max_logprobs": -1,
    "logits_processors": [FORCED],
}


def forcing(tokens: Sequence[int], **options: Any) -> Any:
    """Sampling parameters under which a call generates `tokens`."""
    from vllm import SamplingParams

    extra = {"forced_tokens": list(tokens)}
    return SamplingParams(
        temperature=0.0, max_tokens=len(tokens), ignore_eos=True, extra_args=extra, **options
    )


def distributions(flat: Any) -> np.ndarray:
    """Of vLLM's `FlatLogprobs` over the whole vocabulary: float32 [num_tokens, vocab_size].

    Raises:
        ValueError: tokens are missing.
    """
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))
    vocab_size = 1 + max(flat.token_ids[slice(*spans[0])])
    found: np.ndarray = np.full((len(spans), vocab_size), np.nan, dtype=np.float32)
    for row, span in zip(found, spans, strict=True):
        row[flat.token_ids[slice(*span)]] = flat.logprobs[slice(*span)]
    if np.isnan(found).any():
        raise ValueError("some tokens of the vocabulary have no log-probability")
    return found
