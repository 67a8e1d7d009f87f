# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: the host's or the device's time, whichever is longer.

    device   matrix products: their weights read, or their operations done, what takes longer;
             attention, layer by layer: keys and values read, or operations done, and its kernels;
             with several GPUs, two sums over them in each layer
    host     nothing for a layer where a full CUDA graph holds it, else its launches
    both     scheduling and sampling; choreographed, planning where spans are laid out anew

Nothing else is counted. Vectors are over the steps of a workflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.model.bounds import GPU, ITEMSIZE, PLAN, Rates
from benchmarks.gpu.model.counts import DECODE, FIRST, Counts
from benchmarks.gpu.transformer import Shape

_STOCK_KERNELS = 2  # of attention in a layer: it is split, and merged
_KERNELS = 2  # choreographed: likewise
_SEGMENTS = 2  # that a program goes through, of spans of a few hundred tokens


@dataclass(frozen=True)
class Way:
    """How a side runs its steps.

    Attributes:
        is_choreographed: its attention and planning are ours.
        has_full_graphs: decode steps are one launch.
    """

    name: str
    is_choreographed: bool
    has_full_graphs: bool


STOCK = Way("stock", False, True)
TODAY = Way("choreographed", True, False)
GRAPHS = Way("full graphs", True, True)
WAYS = (STOCK, TODAY, GRAPHS)


@dataclass(frozen=True)
class Machine:
    """Some GPUs with a model on them, cut over all."""

    gpu: GPU
    count: int
    shape: Shape

    @classmethod
    def of(cls, gpu: GPU, shape: Shape) -> Machine:
        """As many GPUs as the model needs."""
        weights = (shape.num_weights() + 2 * shape.hidden_size * shape.vocab_size) * ITEMSIZE
        return cls(gpu, gpu.num_needed(weights), shape)

    def seconds(self, counts: Counts, way: Way, rates: Rates) -> Any:
        """Seconds of each step."""
        device = self._products(counts, rates) + self._attention(counts, way, rates)
        device = device + self._sums(counts, rates)
        layer = rates.layer if way.is_choreographed else rates.stock_layer
        launched = ~((counts.kind == DECODE) & way.has_full_graphs)
        host = self.shape.num_layers * layer * launched
        before = rates.step + self._planning(counts, way, rates)
        return before + np.maximum(device, host)

    def _products(self, counts: Counts, rates: Rates) -> Any:
        """Of the layers for all tokens, and of the head for the last token of each request."""
        head = self.shape.hidden_size * self.shape.vocab_size
        return self._product(self.shape.num_weights(), counts.tokens, rates) + self._product(
            head, counts.requests, rates
        )

    def _product(self, weights: int, rows: Any, rates: Rates) -> Any:
        reading = weights * ITEMSIZE / (self.gpu.bandwidth * rates.weights)
        computing = 2.0 * weights * rows / (self.gpu.products * rates.products)
        return np.maximum(reading, computing) / self.count

    def _attention(self, counts: Counts, way: Way, rates: Rates) -> Any:
        heads, layers = self.shape.heads, self.shape.num_layers
        ours = way.is_choreographed
        reading = rates.reading if ours else rates.stock_reading
        computing = rates.products_of_spans if ours else rates.stock_products
        kv_bytes = 2 * heads.num_kv_heads * heads.head_size * ITEMSIZE * counts.read
        operations = 4.0 * heads.num_heads * heads.head_size * counts.pairs
        long = np.maximum(
            kv_bytes / (self.gpu.bandwidth * reading), operations / (self.gpu.products * computing)
        )
        kernels = _KERNELS if ours else _STOCK_KERNELS
        least = kernels * rates.kernel + (_SEGMENTS * rates.segment if ours else 0.0)
        return layers * (least + long / self.count)

    def _sums(self, counts: Counts, rates: Rates) -> Any:
        if self.count == 1:
            return 0.0
        num_bytes = counts.tokens * self.shape.hidden_size * ITEMSIZE
        sent = num_bytes / (self.gpu.link * rates.link)
        return 2 * self.shape.num_layers * (rates.reduce + sent)

    def _planning(self, counts: Counts, way: Way, rates: Rates) -> Any:
        if not way.is_choreographed:
            return 0.0
        at_all, span, query = PLAN
        seconds = at_all + span * counts.spans + query * counts.tokens
        return rates.plan * seconds * counts.is_planned


@dataclass(frozen=True)
class Times:
    """Seconds of a workflow: mean to a first token, of a decode step, and in all."""

    first_token: float
    decode_step: float
    total: float


def times(machine: Machine, counts: Counts, way: Way, rates: Rates) -> Times:
    """What a workflow takes whose calls run as they are counted."""
    seconds = machine.seconds(counts, way, rates)
    is_first, is_decode = counts.kind == FIRST, counts.kind == DECODE
    first = float((seconds * counts.calls)[is_first].sum() / counts.calls[is_first].sum())
    return Times(first, float(seconds[is_decode].mean()), float(seconds.sum()))
