# SPDX-License-Identifier: Apache-2.0
"""GPUs, models, and between which bounds each rate lies; every bound has its source.

Sources: *vendor*, the data sheet; *published*, others' measurement; *measured*, ours, on CPU;
*assumed*, nothing but experience, and what a first run on a GPU is to correct first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.gpu.cases import Heads
from benchmarks.gpu.transformer import Shape

US, MS = 1e-6, 1e-3
ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class GPU:
    """One GPU, by its data sheet (SXM; without sparsity).

    Attributes:
        bandwidth: of its memory, bytes a second.
        products: 16-bit floating-point operations a second.
        link: bytes a second that it sends to the other GPUs by NVLink.
        memory: bytes.
    """

    bandwidth: float
    products: float
    link: float
    memory: float

    def num_needed(self, weight_bytes: float) -> int:
        """GPUs for a model: a power of two, so that weights take at most 4/5 of their memory."""
        count = 1
        while weight_bytes > 0.8 * count * self.memory:
            count *= 2
        return count


# vendor: https://www.nvidia.com/en-us/data-center/h100, .../h200, .../dgx-b200 (an eighth of it)
GPUS: Mapping[str, GPU] = {
    "H100": GPU(3.35e12, 989e12, 450e9, 80e9),
    "H200": GPU(4.8e12, 989e12, 450e9, 141e9),
    "B200": GPU(8.0e12, 2250e12, 900e9, 180e9),
}

# As in the configurations that come with the weights.
MODELS: Mapping[str, Shape] = {
    "Llama-3.1-8B": Shape(),
    "Qwen3-14B": Shape(40, 5120, Heads(40, 8, 128), 17408, 151936),
    "Qwen3-32B": Shape(64, 5120, Heads(64, 8, 128), 25600, 151936),
    "Llama-3.3-70B": Shape(80, 8192, Heads(64, 8, 128), 28672, 128256),
}


class Bound(NamedTuple):
    """Bounds of a rate, the slower one first, and where they come from."""

    slow: float
    fast: float
    source: str


@dataclass(frozen=True)
class Rates:
    """One choice within the bounds: parts of what the GPU could do, else seconds.

    Attributes:
        weights: part of the bandwidth at which matrix products of few tokens read weights, the
            small kernels between them counted.
        products: part of the GPU's operations in matrix products of many tokens.
        kernel: a kernel of attention on the device, at least.
        step: of the host in each step, where the device waits: scheduling, sampling.
        reduce: a sum over GPUs, at least.
        link: part of NVLink's bandwidth that long sums reach.
        stock_reading, stock_products: of vLLM's attention, as `weights` and `products`.
        stock_layer: of the host for a layer of a step with piecewise graphs.
        reading, products_of_spans: the same of choreographed attention.
        segment: what begins a span of a tile: loads that need one another.
        layer: of the host for a layer of a choreographed step.
        plan: how many times as long planning takes as `PLAN` says.
    """

    weights: float
    products: float
    kernel: float
    step: float
    reduce: float
    link: float
    stock_reading: float
    stock_products: float
    stock_layer: float
    reading: float
    products_of_spans: float
    segment: float
    layer: float
    plan: float


# Those of both sides come first: a ratio is looked for at all their corners.
SHARED: Mapping[str, Bound] = {
    "weights": Bound(0.65, 0.85, "assumed"),
    "products": Bound(0.55, 0.75, "assumed"),
    "kernel": Bound(6 * US, 3 * US, "assumed"),
    "step": Bound(1.0 * MS, 0.2 * MS, "assumed"),
    "reduce": Bound(12 * US, 4 * US, "published: github.com/sgl-project/sglang/pull/2904, H100"),
    "link": Bound(0.25, 0.75, "assumed"),
}
STOCK: Mapping[str, Bound] = {
    "stock_reading": Bound(0.60, 0.88, "assumed"),
    "stock_products": Bound(
        0.43, 0.66, "published: FlashAttention-3, arXiv:2407.08608, head size 128, 0.5k to 16k"
    ),
    "stock_layer": Bound(60 * US, 30 * US, "assumed"),
}
OURS: Mapping[str, Bound] = {
    "reading": Bound(0.35, 0.70, "assumed, from registers and loops: make gpu-check"),
    "products_of_spans": Bound(0.15, 0.22, "assumed, from the instructions of its loop"),
    "segment": Bound(4 * US, 2 * US, "assumed: four loads that need one another"),
    # A layer's launches are prepared; a piece of a graph is left, and two or three launches.
    "layer": Bound(
        40 * US,
        20 * US,
        "measured without a driver: 7 us (benchmarks/gpu/host.py); assumed: three calls of it",
    ),
    "plan": Bound(4.0, 0.8, "measured: planning alone 0.8 to 1.2, in the engine up to 4"),
}
BOUNDS: Mapping[str, Bound] = {**SHARED, **STOCK, **OURS}

# Seconds of planning: at all, and for each span and each query. measured: one core, Xeon 2.8 GHz,
# 3 to 32 requests of 3 to 16 spans of 400 tokens, `plan_shared_reads` and `make_tiles`.
PLAN = (0.9 * MS, 10 * US, 2 * US)


def rates(**given: float) -> Rates:
    """The middle of all bounds, but for those that are given."""
    middle = {name: (bound.slow + bound.fast) / 2 for name, bound in BOUNDS.items()}
    return replace(Rates(**middle), **given)
