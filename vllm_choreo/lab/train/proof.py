# SPDX-License-Identifier: Apache-2.0
"""Proof of how far each layer turns its keys per position, as the model declares it, by running.

The model runs copies of one token, each a call of its own, at several positions. A token that sees
nothing but itself is given its own value, so nothing depends on the position but the rotation: its
keys and queries must be those of position 0, turned by one of the rotations that the model
declares, and its values must be the same. And no call may feel what another one says. Whatever
does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.lab.train.angles import frequency_buffers
from vllm_choreo.lab.train.packed_attention import Scores, carrying
from vllm_choreo.lab.train.packing import PackedCall, Packing, pack
from vllm_choreo.ops import Rotation
from vllm_choreo.ops.reference import rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative to the largest entry: a few units in the last place, after a rotation computed by the
# model in its own precision.
_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 8e-3,
    torch.bfloat16: 4e-2,
}
_TYPES_THAT_VARY = ("dynamic", "longrope")


@dataclass(eq=False)
class LayerRecord:
    """Record of a forward of calls of one token each; gives each token its own value.

    Attributes:
        seen: queries, keys and values of each layer, float64 `[heads, num_tokens, d]`.
    """

    adapted: torch.Tensor | None = None
    seen: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """Record queries, keys and values, and return the values; see `Carried`."""
        self.seen[module] = tuple(x.double() for x in (query, key, value))
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0)


def declared_rotations(model: torch.nn.Module) -> list[Rotation]:
    """The distinct rotations that the model's rotary modules may stand for.

    Their buffers hold frequencies and do not say how components are paired: both ways are
    candidates, and the proof tells.

    Raises:
        UnsupportedModelError: frequencies that depend on the length of the sequence.
    """
    rotations: dict[tuple[float, ...], list[Rotation]] = {}
    for name, module in model.named_modules():
        for kind in _rope_types(module):
            if kind in _TYPES_THAT_VARY:
                raise UnsupportedModelError(
                    f"the frequencies of the rotary embedding {name!r} ({kind}) depend on the "
                    "length of the sequence, so cached keys cannot be turned; train another model",
                    parameter="model",
                    value=name,
                )
        for buffer in frequency_buffers(module):
            inv_freq = buffer.double().cpu()
            both = [Rotation(inv_freq, is_neox) for is_neox in (True, False)]
            rotations.setdefault(tuple(inv_freq.tolist()), both)
    return [rotation for both in rotations.values() for rotation in both]


def _rope_types(module: torch.nn.Module) -> list[str]:
    """Kinds of scaling that a rotary module names: one, or one for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if kinds else []


@torch.no_grad()
def prove_rotations(model: PreTrainedModel) -> dict[torch.nn.Module, Rotation | None]:
    """The rotation of every attention layer; None where keys do not turn.

    Args:
        model: a model of `transformers` whose attention is `packed_attention.NAME`.

    Raises:
        UnsupportedModelError: positions, or calls beside one another, act in any other way.
    """
    _check_layer_types(model)
    candidates: list[Rotation | None] = [None, *declared_rotations(model)]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    positions = [0, *(1 << bit for bit in range((context - 1).bit_length())), context - 1]
    was_training = model.training
    model.eval()
    try:
        record, logits = _record(model, positions, first=7)
        _, others = _record(model, positions, first=11)
    finally:
        model.train(was_training)
    tolerance = _TOLERANCE[logits.dtype]
    if float((others - logits)[1:].abs().max()) > tolerance * float(logits.abs().max()):
        raise _refused(
            "a token changes what later calls of the same packed sequence compute although they "
            "do not read it (state layers, convolutions over time or absolute indices)",
            type(model).__name__,
        )
    if not record.seen:
        raise _refused(
            "no layer calls the attention interface of transformers",
            type(model).__name__,
        )
    return {
        module: _match(module, seen, positions, candidates, tolerance)
        for module, seen in record.seen.items()
    }


def _check_layer_types(model: PreTrainedModel) -> None:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    others = set(kinds) - {"full_attention"}
    if others:
        raise _refused(f"it has layers of kind {', '.join(sorted(others))}", type(model).__name__)


def _refused(reason: str, value: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model cannot be trained on packed transcripts: {reason}; train another model",
        parameter="model",
        value=value,
    )


def _record(
    model: PreTrainedModel, positions: Sequence[int], first: int
) -> tuple[LayerRecord, torch.Tensor]:
    """Run token 7 at each position, `first` at the first one; return the record and the logits."""
    last = model.config.get_text_config().vocab_size - 1
    tokens = [min(first, last), *[min(7, last)] * (len(positions) - 1)]
    calls = [PackedCall((token,), (), at) for token, at in zip(tokens, positions, strict=True)]
    packing: Packing = pack(calls).to(model.device)
    record = LayerRecord(adapted=torch.zeros(len(calls), dtype=torch.bool, device=model.device))
    with carrying(record):
        logits = model(
            input_ids=packing.token_ids[None],
            position_ids=packing.positions[None],
            use_cache=False,
        ).logits[0]
    return record, logits


def _match(
    module: torch.nn.Module,
    seen: tuple[torch.Tensor, ...],
    positions: Sequence[int],
    candidates: Sequence[Rotation | None],
    tolerance: float,
) -> Rotation | None:
    """The one candidate by which a layer's queries and keys differ between positions."""
    at = torch.tensor(positions)
    query, key, value = (x.cpu() for x in seen)
    errors = [max(_error(x, at, rotation) for x in (query, key)) for rotation in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    name = type(module).__name__
    if errors[best] > tolerance:
        raise _refused(
            "between two positions the queries and keys of a layer do not differ by a rotation "
            f"that the model declares (closest: relative error {errors[best]:.2g}; learned "
            "absolute positions, M-RoPE and queries scaled by their position are not supported)",
            name,
        )
    if _error(value, at, None) > tolerance:
        raise _refused("the values of a layer depend on the position", name)
    return candidates[best]


def _error(x: torch.Tensor, at: torch.Tensor, rotation: Rotation | None) -> float:
    """Largest relative deviation from the entries at position 0, turned by `rotation`."""
    start = x[:, :1].expand_as(x)
    if rotation is not None:
        if rotation.rotary_dim > x.shape[-1]:
            return float("inf")
        start = rotate(start, rotation.cos_sin(at).double(), rotation.is_neox)
    return float((start - x).abs().max() / (x.abs().max() or 1.0))
