# SPDX-License-Identifier: Apache-2.0
"""Calls by other weights, by their definition: the dense oracle with an attention of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.engine.oracle import Encoded, Oracle, Parent


@dataclass(frozen=True)
class WeighedOracle:
    """The oracle, whose calls attend to all parents but the first by other weights.

    By the definition of APE: scores of these over the temperature; with L their log-sum-exp, their
    weights in the one softmax sum up to exp(temperature * scale * L).
    """

    oracle: Oracle
    temperature: float
    scale: float

    def encode(
        self, token_ids: Sequence[int], parents: Sequence[Parent] = (), new_offset: int = 0
    ) -> Encoded:
        sizes = [parent.stop - parent.start for parent in parents]
        with self._attention(sum(sizes[:1]), sum(sizes)):
            return self.oracle.encode(token_ids, parents, new_offset)

    @contextmanager
    def _attention(self, first: int, stop: int) -> Iterator[None]:
        """Within, keys `first … stop-1` count so."""
        modules = self.oracle.layers.modules()
        layer = next(type(m) for m in modules if hasattr(m, "num_key_value_groups"))
        names = inspect.unwrap(layer.forward).__globals__
        ours = names["eager_attention_forward"]

        def forward(
            module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
            scores = query @ key.transpose(2, 3) * scaling + mask
            chosen = scores[..., first:stop] / self.temperature
            total = chosen.logsumexp(-1, keepdim=True)
            # Where a window hides them all, there is nothing to weigh.
            total = total.where(total > torch.finfo().min / 2, 0.0)
            scores[..., first:stop] = chosen + (self.temperature * self.scale - 1) * total
            if (sinks := getattr(module, "sinks", None)) is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand_as(scores[..., :1])], -1)
            weights = scores.softmax(-1)[..., : key.shape[2]]
            return (weights @ value).transpose(1, 2).contiguous(), None

        names["eager_attention_forward"] = forward if first < stop else ours
        try:
            yield
        finally:
            names["eager_attention_forward"] = ours
