# SPDX-License-Identifier: Apache-2.0
"""Attention of an engine in this process, watched or bent, by the reference implementation.

For experiments: it is slow, and takes one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_choreo.engine.worker import attention as module
from vllm_choreo.ops import reference

Attend = Callable[..., None]


@contextmanager
def _instead(make: Callable[[Attend], Attend]) -> Iterator[None]:
    """Within, the engine's layers call `make` of what they call."""
    ours = module.span_attention
    module.span_attention = make(ours)
    try:
        yield
    finally:
        module.span_attention = ours


class Watched:
    """Sums of the attention that the first step of a request gives to each span.

    Args:
        layers: that count.

    Attributes:
        spans: of each parent, the attention to its tokens, summed over heads, queries and layers,
            float32 `[num_tokens]`.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.spans: list[np.ndarray] = []
        self._layers = set(layers)
        self._num_calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _instead(self._watch):
            yield

    def _watch(self, ours: Attend) -> Attend:
        def attend(query: Any, kv_cache: Any, output: Any, plan: Any, layer: Any, *a: Any) -> None:
            # Layers call in their order: the calls after those of the first step count no more.
            if self._num_calls in self._layers:
                self._add(reference._Queries(query, kv_cache, plan, layer))
            self._num_calls += 1
            ours(query, kv_cache, output, plan, layer, *a)

        return attend

    def _add(self, queries: Any) -> None:
        spans = queries.plan.spans
        assert spans.num_reqs == 1, "one request at a time"
        sizes = spans.num_tokens.tolist()
        own = len(sizes) - 1
        scores = [queries.read(0, j, 0, size, j == own)[0] for j, size in enumerate(sizes)]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).sum((0, 1, 2))
        parts = [part.numpy() for part in weights.split(sizes)][:own]
        before = self.spans or [np.zeros_like(part) for part in parts]
        self.spans = [a + b for a, b in zip(before, parts, strict=True)]


@contextmanager
def bent(temperature: float, factor: float) -> Iterator[None]:
    """Within, what stands between the first parent and the reader is attended to as APE does
    (arXiv 2502.05431, 3): scores divided by a temperature, and the log-sum-exp of the whole
    multiplied by `temperature * factor` before it is merged with the rest.
    """

    def make(ours: Attend) -> Attend:
        def attend(query: Any, kv_cache: Any, output: Any, plan: Any, layer: Any, *a: Any) -> None:
            queries, spans = reference._Queries(query, kv_cache, plan, layer), plan.spans
            rows = output.view(query.shape)
            for r in range(spans.num_reqs):
                first, end = spans.span_start_loc[r : r + 2].tolist()
                sizes = spans.num_tokens.tolist()
                read = [queries.read(r, j, 0, sizes[j], j == end - 1) for j in range(first, end)]
                rest = queries.attend(r, [read[0], read[-1]])
                hot = [(scores / temperature, values) for scores, values in read[1:-1]]
                result, lse = queries.attend(r, hot)
                queries.store(r, [rest, (result, lse * temperature * factor)], rows)

        return attend

    with _instead(make):
        yield
