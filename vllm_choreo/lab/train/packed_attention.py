# SPDX-License-Identifier: Apache-2.0
"""The attention function that `transformers` calls in every layer of a packed forward.

What a forward carries to its layers is a context variable: not every architecture hands keyword
arguments through to its attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.lab.train.packing import Packing
from vllm_choreo.ops import Rotation
from vllm_choreo.ops.reference import rotate

NAME = "choreo"  # of the attention implementation

# Keyword arguments of an attention layer that change no result here: positions are in the keys
# already, and masks are the packing's own.
_HARMLESS = frozenset(
    "cache_position cu_seq_lens_k cu_seq_lens_q is_causal max_length_k max_length_q "
    "num_items_in_batch output_attentions output_hidden_states output_router_logits "
    "position_ids position_embeddings use_cache".split()
)


@dataclass(frozen=True)
class Scores:
    """Numbers by which a layer turns products of queries and keys into weights.

    Attributes:
        scale: factor of the products.
        softcap: bound of the products, by `softcap * tanh(score / softcap)`; None: no bound.
        dropout: probability that a weight is dropped; 0 outside of training.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0


class Carried(Protocol):
    """State that a forward carries to its attention layers.

    `adapted`: bool `[num_tokens]`, the tokens on which a LoRA adapter acts; None: on all.
    """

    adapted: torch.Tensor | None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """Query `[num_heads, n, d]`, key, value `[num_kv_heads, n, d]` → `[num_heads, n, d]`."""


_CARRIED: ContextVar[Carried | None] = ContextVar("carried", default=None)


@contextmanager
def carrying(value: Carried) -> Iterator[None]:
    """Run a forward that carries `value`."""
    token = _CARRIED.set(value)
    try:
        yield
    finally:
        _CARRIED.reset(token)


def carried() -> Carried:
    """State that the running forward carries.

    Raises:
        UnsupportedModelError: the model was called by other means than ours.
    """
    value = _CARRIED.get()
    if value is None:
        raise UnsupportedModelError(
            "this model was prepared for packed transcripts and runs nothing else: call "
            "PackedModel.logits (with PackedModel.checkpoint_gradients, not with the model's own "
            "gradient checkpointing), or load the model once more",
            parameter="model",
        )
    return value


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for `torch.utils.checkpoint`: a layer that runs again finds what is carried now.

    It may run in another thread, and after the forward.
    """
    return carrying(carried()), carrying(carried())


def register() -> None:
    """Make the implementation known to `transformers`; twice does no harm.

    No mask is registered beside it: then `transformers` makes none, and hands None to the layers.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over a packed sequence, as `transformers` calls it.

    Args:
        query: `[1, num_heads, num_tokens, head_size]`, rotated by the layer.
        key, value: the same with num_kv_heads.

    Returns:
        `[1, num_tokens, num_heads, head_size]`, and None for the weights.

    Raises:
        UnsupportedModelError: the layer asks for an option that is not computed here.
    """
    unknown = {name for name, option in options.items() if option is not None} - _HARMLESS
    if attention_mask is not None:
        unknown.add("attention_mask")
    window = _window(module, sliding_window)
    if window is not None:
        unknown.add(f"sliding_window={window}")
    if unknown:
        raise UnsupportedModelError(
            f"the attention of {type(module).__name__} uses {', '.join(sorted(unknown))}, which "
            "packed training does not know; train another model",
            parameter="model",
            value=type(module).__name__,
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, softcap, dropout)
    output = carried().attend(module, query[0], key[0], value[0], scores)
    return output.transpose(0, 1)[None].contiguous(), None


def _window(module: torch.nn.Module, window: int | None) -> int | None:
    """A sliding window that hides something: one as long as the context hides nothing."""
    config = getattr(module, "config", None)
    context = getattr(config, "max_position_embeddings", None)
    return window if window is not None and (context is None or window < context) else None


@dataclass(eq=False)
class PackedAttention:
    """One forward of a packing: reads the parents' keys where each call sees them.

    Attributes:
        packing: all calls of the forward, on the model's device.
        rotations: rotation of each attention layer; None: its keys do not turn.
        adapted: tokens on which an adapter acts, see `Carried`.
    """

    packing: Packing
    rotations: Mapping[torch.nn.Module, Rotation | None]
    adapted: torch.Tensor | None = None
    _cos_sin: dict[Rotation, torch.Tensor] = field(default_factory=dict, repr=False)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """Attend call by call, each to the keys that it reads; see `Carried`."""
        packing = self.packing
        keys = self._turned(self.rotations[module], key[:, packing.key_rows])
        values = value[:, packing.key_rows]
        outputs = []
        for call, mask in enumerate(packing.masks):
            read = packing.keys(call)
            outputs.append(
                attend(query[:, packing.rows(call)], keys[:, read], values[:, read], mask, scores)
            )
        return torch.cat(outputs, dim=1)

    def _turned(self, rotation: Rotation | None, keys: torch.Tensor) -> torch.Tensor:
        """Keys `[num_kv_heads, num_keys, head_size]` at the positions where they are seen."""
        if rotation is None:
            return keys
        if rotation not in self._cos_sin:
            self._cos_sin[rotation] = rotation.cos_sin(self.packing.deltas)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        cos_sin = self._cos_sin[rotation].to(dtype)
        return rotate(keys.to(dtype), cos_sin, rotation.is_neox).to(keys.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Attention of one call.

    Args:
        query: `[num_heads, num_queries, head_size]`.
        key, value: `[num_kv_heads, num_keys, head_size]`.
        mask: bool `[num_queries, num_keys]`; None: as many keys as queries, causal.

    Returns:
        `[num_heads, num_queries, head_size of value]`.
    """
    if scores.softcap is None:
        return F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            dropout_p=scores.dropout,
            is_causal=mask is None,
            scale=scores.scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )[0]
    group = query.shape[0] // key.shape[0]
    products = query @ key.repeat_interleave(group, dim=0).mT * scores.scale
    products = scores.softcap * torch.tanh(products / scores.softcap)
    if mask is None:
        mask = torch.ones(products.shape[1:], dtype=torch.bool, device=query.device).tril()
    products = products.masked_fill(~mask, float("-inf"))
    weights = products.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = F.dropout(weights.to(query.dtype), scores.dropout)
    return weights @ value.repeat_interleave(group, dim=0)
