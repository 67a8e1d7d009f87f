# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention layers: those of one kind read by the same plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_choreo.ops import Rotation


class LayerShape(NamedTuple):
    """Shape of a layer, on which its tiles depend; heads are this worker's share."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int | None = None


class LayerKind(NamedTuple):
    """Layers of one kind take the same plan.

    Attributes:
        rotation: rotary embedding of the layer; None: it has none.
        shape: heads, dtype and window of the layer.
        token_bytes: bytes of a token's keys and values, as the layer caches them.
        group: layers of a group read the same spans, see `RequestSpans.of_group`.
    """

    rotation: Rotation | None
    shape: LayerShape
    token_bytes: int
    group: int = 0
