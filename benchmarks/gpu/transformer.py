# SPDX-License-Identifier: Apache-2.0
"""A transformer of the Llama kind with random weights, whose attention is left to the caller.

As in a serving engine, what lies between the attention of two layers is one CUDA graph for small
steps, so that a step of few tokens takes what reading the weights takes, and not what launching a
dozen kernels per layer costs the host. Larger steps run the same code directly.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import Heads

# Attention of one layer: layer, queries ``[n, num_heads, head_size]``, where outputs go.
Attend = Callable[[int, torch.Tensor, torch.Tensor], None]

# Steps of up to so many tokens are padded to one of these sizes.
GRAPH_SIZES = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Shape:
    """Of a model; the default is that of Llama-3.1-8B."""

    num_layers: int = 32
    hidden_size: int = 4096
    heads: Heads = Heads(32, 8, 128)  # noqa: RUF009 (frozen)
    intermediate_size: int = 14336
    vocab_size: int = 128256
    rope_theta: float = 500000.0

    def num_weights(self) -> int:
        """Weights that a token meets in matrix products."""
        heads, size = self.heads, self.heads.head_size
        attention = self.hidden_size * size * 2 * (heads.num_heads + heads.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights ``[out, in]``; norms are vectors of ones."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Buffers:
    """What one step keeps between its pieces, for `num_tokens` tokens."""

    def __init__(self, shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device):
        heads = shape.heads
        zeros = functools.partial(torch.zeros, device=device)
        # Rows: token ids, positions, slots. Padding writes to slot 0, which nobody reads.
        self.indices = zeros(3, num_tokens, dtype=torch.int64)
        self.residual = zeros(num_tokens, shape.hidden_size, dtype=dtype)
        self.query = zeros(num_tokens, heads.num_heads, heads.head_size, dtype=dtype)
        self.attended = torch.zeros_like(self.query)
        self.hidden = torch.zeros_like(self.residual)


class Model:
    """Random weights, and the KV cache that they write.

    Args:
        max_position: positions below it can be used.
        num_slots: of the KV cache, in tokens.
        use_graphs: capture small steps; needs a GPU.

    Attributes:
        cache: of each layer, ``[num_slots, num_kv_heads, 2 * head_size]``.
        graph_failure: why steps are not captured though they should be.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        num_slots: int,
        use_graphs: bool,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        heads, size = shape.heads, shape.heads.head_size
        all_heads = heads.num_heads + 2 * heads.num_kv_heads
        self._embedding = torch.randn(
            shape.vocab_size, shape.hidden_size, dtype=dtype, device=device
        )
        self._head = self._weight(shape.vocab_size, shape.hidden_size)
        self._layers = [
            Layer(
                qkv=self._weight(all_heads * size, shape.hidden_size),
                out=self._weight(shape.hidden_size, heads.num_heads * size),
                gate_up=self._weight(2 * shape.intermediate_size, shape.hidden_size),
                down=self._weight(shape.hidden_size, shape.intermediate_size),
            )
            for _ in range(shape.num_layers)
        ]
        cache = (num_slots, heads.num_kv_heads, 2 * size)
        self.cache = [torch.zeros(cache, dtype=dtype, device=device) for _ in self._layers]
        self._cos, self._sin = _rope_tables(shape, max_position, device)
        compiled = functools.partial(torch.compile, dynamic=True)
        is_cuda = device.type == "cuda"
        self._rotate = compiled(_rotate) if is_cuda else _rotate
        self._swiglu = compiled(_swiglu) if is_cuda else _swiglu
        self._captured: dict[int, tuple[Buffers, list[Callable[[], None]]]] = {}
        self.graph_failure = ""
        if use_graphs:
            self._capture_all()

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weight.normal_(std=columns**-0.5)

    def _capture_all(self) -> None:
        """Capture every size; where that fails, none, and `graph_failure` says why."""
        gc.collect()
        gc.freeze()  # each capture collects garbage, which takes long among many objects
        try:
            for num_tokens in reversed(GRAPH_SIZES):  # the largest first: the others fit its memory
                self._captured[num_tokens] = self._capture(num_tokens)
        except RuntimeError as error:
            self._captured.clear()
            self.graph_failure = str(error)

    # -- a step ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        attend: Attend,
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Encode tokens; keys and values of a layer are stored before `attend` is called for it.

        Returns:
            Logits ``[len(wanted), vocab_size]`` of these tokens.
        """
        n = len(tokens)
        size = next((size for size in GRAPH_SIZES if size >= n), n)
        if size not in self._captured:
            size = n
        buffers, pieces = self._captured.get(size) or self._pieces(n)
        padding = [0] * (size - n)
        indices = [[*row, *padding] for row in (tokens, positions, slots)]
        buffers.indices.copy_(torch.tensor(indices))
        for layer, piece in enumerate(pieces[:-1]):
            piece()
            attend(layer, buffers.query[:n], buffers.attended[:n])
        pieces[-1]()
        return F.linear(buffers.hidden[list(wanted)], self._head)

    def _pieces(self, num_tokens: int) -> tuple[Buffers, list[Callable[[], None]]]:
        """What runs before, between and after the attention of the layers."""
        b = Buffers(self.shape, num_tokens, self.dtype, self.device)
        middle = [functools.partial(self._between, i, b) for i in range(self.shape.num_layers - 1)]
        first, last = functools.partial(self._before, b), functools.partial(self._after, b)
        return b, [first, *middle, last]

    def _capture(self, num_tokens: int) -> tuple[Buffers, list[Callable[[], None]]]:
        """The pieces as CUDA graphs."""
        buffers, pieces = self._pieces(num_tokens)
        with torch.inference_mode():
            for piece in pieces:
                piece()  # compiles, and lets libraries allocate what they need
            torch.cuda.synchronize(self.device)
            graphs = []
            pool = torch.cuda.graph_pool_handle()
            for piece in pieces:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    piece()
                graphs.append(graph)
        return buffers, [graph.replay for graph in graphs]

    def _before(self, b: Buffers) -> None:
        b.residual.copy_(F.embedding(b.indices[0], self._embedding))
        self._project(0, b)

    def _between(self, i: int, b: Buffers) -> None:
        self._finish(i, b)
        self._project(i + 1, b)

    def _after(self, b: Buffers) -> None:
        self._finish(self.shape.num_layers - 1, b)
        b.hidden.copy_(self._norm(b.residual))

    def _project(self, i: int, b: Buffers) -> None:
        """Queries, keys and values of a layer; the latter two go to the cache."""
        heads = self.shape.heads
        counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        projected = F.linear(self._norm(b.residual), self._layers[i].qkv)
        query, key, value = projected.unflatten(1, (-1, heads.head_size)).split(counts, dim=1)
        cos, sin = self._cos[b.indices[1]], self._sin[b.indices[1]]
        b.query.copy_(self._rotate(query, cos, sin))
        stored = torch.cat([self._rotate(key, cos, sin), value], dim=-1)
        self.cache[i].index_copy_(0, b.indices[2], stored)

    def _finish(self, i: int, b: Buffers) -> None:
        """What follows the attention of a layer."""
        layer = self._layers[i]
        b.residual += F.linear(b.attended.flatten(1), layer.out)
        inner = self._swiglu(F.linear(self._norm(b.residual), layer.gate_up))
        b.residual += F.linear(inner, layer.down)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


def _rope_tables(
    shape: Shape, max_position: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[max_position, 1, head_size / 2]``, float32 from float64."""
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * rope_frequencies(shape)
    return angles.cos().float().to(device)[:, None], angles.sin().float().to(device)[:, None]


def rope_frequencies(shape: Shape) -> torch.Tensor:
    """Radians per position, float64 ``[head_size / 2]``."""
    dims = torch.arange(0, shape.heads.head_size, 2, dtype=torch.float64)
    return shape.rope_theta ** (-dims / shape.heads.head_size)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
