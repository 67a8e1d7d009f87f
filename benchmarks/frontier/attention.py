# SPDX-License-Identifier: Apache-2.0
"""Attention of an engine in this process, bent, by the reference implementation.

For experiments: it is slow, and takes one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
