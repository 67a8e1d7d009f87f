# SPDX-License-Identifier: Apache-2.0
"""The position probe: which rotary embedding has each layer?

One token at a time is run through the loaded model, at several positions. With one token,
attention is the identity on values, so nothing in the model depends on the position but the
rotation of queries and keys: between two positions they must differ exactly by one of the
rotations that the model's modules declare, or not at all. Whatever does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.forward_context import set_forward_context

from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.ops import Rotation

# Relative error of a rotated query, by dtype: a few units in the last place of its largest
# entries, after a rotation computed by the model in its own precision. Angles in float32 carry
# a relative error of 6e-8, times up to 8,191 positions: 5e-4.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 8e-3}


@dataclass
class QueryRecorder:
    """Takes the place of attention metadata: records queries and keys, passes values through."""

    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: dict[str, torch.Tensor] = field(default_factory=dict)

    def record(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Shapes: query, output `[1, num_heads, head_size]`; key, value with num_kv_heads."""
        self.queries[layer.layer_name] = query.detach().to("cpu", torch.float32, copy=True)
        self.keys[layer.layer_name] = key.detach().to("cpu", torch.float32, copy=True)
        group = query.shape[1] // value.shape[1]
        output.copy_(value.repeat_interleave(group, dim=1).view_as(output))
        return output


@dataclass(frozen=True)
class LayerPositions:
    """What the probe proved of one layer. `max_error` is relative to the largest entry."""

    layer: str
    rotation: Rotation | None
    max_error: float

    def describe(self) -> dict[str, Any]:
        """Plain data, to travel between processes."""
        rotation = self.rotation
        return {
            "layer": self.layer,
            "rope": rotation is not None,
            "rotary_dim": rotation.rotary_dim if rotation else 0,
            "is_neox": rotation.is_neox if rotation else None,
            "longest_wavelength": float(6.283185307179586 / rotation.inv_freq.min())
            if rotation
            else None,
            "max_error": self.max_error,
        }


def declared_rotations(model: torch.nn.Module, max_position: int) -> list[Rotation]:
    """The distinct rotations that the model's rotary modules declare.

    vLLM's modules hold a table of cosines and sines. Those of `transformers`, on which vLLM runs
    architectures that it has no own code for, hold frequencies and do not say how dims are
    paired: both ways are candidates, and the probe tells.

    Raises:
        UnsupportedModelError: a module that does not turn by a fixed angle per position.
    """
    rotations: dict[tuple[Any, ...], Rotation] = {}
    for name, module in model.named_modules():
        if hasattr(module, "_compute_cos_sin_cache"):
            if not hasattr(module, "cos_sin_cache"):  # several tables, chosen by length
                raise _length_dependent(name)
            # Not the buffer `cos_sin_cache`: that one is rounded to the model's dtype.
            table = module._compute_cos_sin_cache()
            inv_freq = _frequencies(table, min(max_position, table.shape[0]), name)
            pairings = [module.is_neox_style]
        elif isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            if getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
                raise _length_dependent(name)
            inv_freq, pairings = module.inv_freq.double().cpu(), [True, False]
        else:
            continue
        for is_neox in pairings:
            rotation = Rotation(inv_freq=inv_freq, is_neox=is_neox)
            rotations.setdefault((is_neox, *inv_freq.tolist()), rotation)
    return list(rotations.values())


def _length_dependent(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the rotary embedding {name!r} does not turn by a fixed angle per position (its "
        "frequencies depend on the sequence length); such a model cannot be choreographed: run "
        'it without the plugin (VLLM_PLUGINS="")',
        parameter="model",
        value=name,
    )


def _frequencies(table: torch.Tensor, num_positions: int, name: str) -> torch.Tensor:
    """Angles per position (float64 `[rotary_dim / 2]`) of a table of cosines and sines.

    Row `p` holds cos and sin of `p * f`, up to turns and a common factor (YaRN). Row 1 gives `f`
    roughly, and each power of two doubles the precision: a product by a power of two is exact,
    so the last such row gives the very frequencies from which the table was made.

    Args:
        table: `[max_position, rotary_dim]`, cos then sin.
    """
    cos, sin = table.double().cpu().chunk(2, dim=-1)
    angles = torch.atan2(sin, cos)
    turn = 2 * torch.pi
    inv_freq, row = angles[min(1, len(angles) - 1)].clone(), 2
    while row < num_positions:
        turns = torch.round((row * inv_freq - angles[row]) / turn)
        inv_freq = (angles[row] + turns * turn) / row
        row *= 2
    positions = torch.arange(num_positions, dtype=torch.float64)[:, None]
    difference = positions * inv_freq - angles[:num_positions]
    error = (difference - torch.round(difference / turn) * turn).abs()
    # The table's own arithmetic: a product rounded to float32, and its cosine.
    allowed = 2e-6 + positions * inv_freq.abs() * 2.4e-7
    if bool((error > allowed).any()):
        raise _length_dependent(name)
    return inv_freq


@torch.inference_mode()
def probe_positions(
    model: torch.nn.Module, vllm_config: Any, layers: Sequence[str], device: torch.device
) -> list[LayerPositions]:
    """Find out, and prove, the rotation of every attention layer.

    Args:
        model: loaded; its attention layers run our backend.
        layers: names of its attention layers.

    Raises:
        UnsupportedModelError: a layer in which positions act in any other way.
    """
    max_position = vllm_config.model_config.max_model_len
    candidates: list[Rotation | None] = [None, *declared_rotations(model, max_position)]
    far = max(2, min(max_position - 1, 4099))
    records = {p: _record(model, vllm_config, p, layers, device) for p in (0, 1, far)}
    tolerance = _TOLERANCE[vllm_config.model_config.dtype]
    return [_match(layer, candidates, records, tolerance) for layer in layers]


def _record(
    model: torch.nn.Module,
    vllm_config: Any,
    position: int,
    layers: Sequence[str],
    device: torch.device,
) -> QueryRecorder:
    """Run one token at `position` and record what every layer asks."""
    recorder = QueryRecorder()
    # Of the dtype that vLLM's runners give: a compiled model takes no other.
    token_id = min(7, vllm_config.model_config.get_vocab_size() - 1)
    token = torch.full((1,), token_id, dtype=torch.int32, device=device)
    with set_forward_context(dict.fromkeys(layers, recorder), vllm_config, num_tokens=1):
        model(input_ids=token, positions=torch.full((1,), position, device=device))
    return recorder


def _match(
    layer: str,
    candidates: Sequence[Rotation | None],
    records: dict[int, QueryRecorder],
    tolerance: float,
) -> LayerPositions:
    """The one candidate by which the layer's queries and keys differ between positions."""
    if any(layer not in record.queries for record in records.values()):
        raise UnsupportedModelError(
            "the layer did not run when one token was put through the model, so its positions "
            'cannot be verified; run this model without the plugin (VLLM_PLUGINS="")',
            parameter="model",
            value=layer,
        )
    errors = [_error(layer, candidate, records) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if errors[best] > tolerance:
        raise UnsupportedModelError(
            "between two positions the queries of this layer do not differ by a rotation that "
            f"the model declares (closest: relative error {errors[best]:.2g}). Learned absolute "
            "positions, M-RoPE and frequencies that depend on the length cannot be "
            'choreographed: run this model without the plugin (VLLM_PLUGINS="")',
            parameter="model",
            value=layer,
        )
    return LayerPositions(layer, candidates[best], errors[best])


def _error(layer: str, rotation: Rotation | None, records: dict[int, QueryRecorder]) -> float:
    """Largest deviation from `rotation`, over positions, queries and keys."""
    worst = 0.0
    for position, record in records.items():
        for start, end in (
            (records[0].queries[layer], record.queries[layer]),
            (records[0].keys[layer], record.keys[layer]),
        ):
            expected = start if rotation is None else rotate(start, rotation, position)
            scale = float(end.abs().max()) or 1.0
            worst = max(worst, float((expected - end).abs().max()) / scale)
    return worst


def rotate(vectors: torch.Tensor, rotation: Rotation, delta: int) -> torch.Tensor:
    """`vectors` (float32 `[..., head_size]`) turned by `delta` positions."""
    half, dim = rotation.rotary_dim // 2, rotation.rotary_dim
    cos, sin = rotation.cos_sin(torch.tensor([delta]))[0].split(half)
    turned, rest = vectors[..., :dim], vectors[..., dim:]
    if rotation.is_neox:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)
