# SPDX-License-Identifier: Apache-2.0
"""Two halves of an attention call: the plan of a step's reads, and the layer.

    span_attention(query, kv_cache, output, plan, layer)

A *plan* is made once per step for all layers that are alike; a *layer* once per model. Every
implementation takes both, and makes of them what its kernels need.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_choreo.ops.flash_prefills import FlashPrefills
from vllm_choreo.ops.layout import Layout
from vllm_choreo.ops.quantized import QuantizedKV
from vllm_choreo.ops.sharing import SharedReads
from vllm_choreo.ops.spans import SpanBatch
from vllm_choreo.ops.tiles import Tiles


@dataclass(frozen=True, eq=False)
class SpanPlan:
    """Reads of a step, for the layers of one rotation. Its tensors are not written after.

    Attributes:
        spans: spans of all requests; ``spans.validate()`` is the caller's duty.
        cos_sin: float32 ``[num_spans, rotary_dim]`` of each span's ``position_delta`` (see
            ``Rotation.cos_sin``); None for layers without rotary embedding.
        reads: ``plan_shared_reads`` of the spans: tokens that several requests attend to are read
            once, with the same result; None: each request reads for itself.
        tiles: ``make_tiles`` of spans and reads, for ``impl="triton"``, which otherwise makes
            them in every call; others do without.
        workspace: flat float32 of ``sharing.PARTIAL_BYTES``, on the device, for the partial results
            of ``impl="triton"``, which otherwise allocates in every call. Layers run one after
            another, so all share it.
        prefills: last requests, which FlashAttention runs for ``impl="triton"``, whose `tiles` have
            none of their queries; others run them like the rest.
    """

    spans: SpanBatch
    cos_sin: torch.Tensor | None
    reads: SharedReads | None = None
    tiles: Tiles | None = None
    workspace: torch.Tensor | None = None
    prefills: FlashPrefills | None = None

    @functools.cached_property
    def launches(self) -> dict[object, Any]:
        """Launches of its tiles, by the looks of layers.

        Plans have them in common that differ in no more than where block table and numbers of own
        tokens lie, and what they say.
        """
        assert self.tiles is not None
        table = self.spans.block_table
        # What such plans have in common counts by which it is, and is kept: else what comes after
        # it could be given its id, and launched with its addresses.
        common = self.cos_sin, self.spans.reweighting, self.workspace
        look = (
            *map(id, common),
            *(self.spans.block_size, table.shape, table.stride(), table.dtype, table.device),
            *(address % 16 for address in self.addresses),
        )
        _, found = self.tiles.launches.setdefault(look, (common, {}))
        return found

    @functools.cached_property
    def addresses(self) -> tuple[int, int]:
        """Where the block table and the numbers of own tokens lie."""
        assert self.tiles is not None
        return self.spans.block_table.data_ptr(), self.tiles.own_tokens.data_ptr()


# Numbers of all looks of layers of this process.
_looks: dict[object, int] = {}


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Properties of an attention layer, which decide how queries score keys.

    The score of a query against key ``l`` of span ``j`` is ``scale * rot(q, delta_j) . k_l``, then
    ``softcap * tanh(score / softcap)`` if there is a cap, then plus
    ``slope * (seen position of the key - position of the query)`` with ALiBi.

    In a window the query attends only to keys with
    ``position of the query - seen position of the key < window``, so to all to its right. A sink
    is one more score of every query, of a key whose value is zero.

    Attributes:
        scale: factor of the dot products.
        is_neox: pairing of dims by the rotary embedding, see ``Rotation``.
        softcap: cap of the scores, 0 for none.
        alibi_slopes: float32 ``[num_heads]``, or None.
        window: tokens, the query's own included, at least 1; None: all tokens.
        sinks: float32 ``[num_heads]``, as scores after ``scale``, never capped; or None.
        layout: layout of the layer's KV cache.
        quantized: meaning of the bytes of a KV cache in 8 bits; None: it is of the queries' dtype.
        value_size: numbers of a value in a latent cache, with which each key begins; those behind
            them rotate. None: values are as long as keys, whose first numbers rotate.
    """

    scale: float
    is_neox: bool = True
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    layout: Layout = Layout.KEYS_TRANSPOSED
    quantized: QuantizedKV | None = None
    value_size: int | None = None

    @functools.cached_property
    def look(self) -> int:
        """Number for all of it but where its tensors lie: the same for layers that are alike."""
        tensors = (self.alibi_slopes, self.sinks)
        looks = (t if t is None else (t.shape, t.dtype, t.data_ptr() % 16) for t in tensors)
        look = (
            *(self.scale, self.is_neox, self.softcap, self.window, self.layout),
            *(self.quantized, self.value_size, *looks),
        )
        return _looks.setdefault(look, len(_looks))

    @functools.cached_property
    def addresses(self) -> tuple[int | None, int | None]:
        """Where slopes and sinks lie; None: there are none."""
        slopes, sinks = (t if t is None else t.data_ptr() for t in (self.alibi_slopes, self.sinks))
        return slopes, sinks
