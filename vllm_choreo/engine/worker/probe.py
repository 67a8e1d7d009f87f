# SPDX-License-Identifier: Apache-2.0
"""The position probe, which finds the rotary embedding of each layer.

One token, a text of its own, is run through the loaded model, at several positions at once. With
every token alone, attention is the identity on values, and a state is what one token leaves. So
nothing in the model depends on the position but the rotation of queries and keys: between two
positions they must differ exactly by one of the rotations that the model's modules declare, or not
at all. The length of queries may differ where the model's configuration says that it scales them.
Whatever does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.forward_context import set_forward_context
from vllm.transformers_utils.config import mrope_num_dims

from vllm_choreo.engine.query_scaling import scales_queries
from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.ops import Rotation
from vllm_choreo.ops.reference import rotate

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_choreo.engine.worker.state_layers import StateLayers

# Relative error of a rotated query, by dtype: a few units in the last place of its largest
# entries, after a rotation computed by the model in its own precision. Angles in float32 carry
# a relative error of 6e-8, times up to 8,191 positions: 5e-4.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 8e-3}
# Of a query's length, in which the errors of its entries average out. A model that scales queries
# by 1 + 0.1 log(1 + p // 8192) has 7e-2 at its first step.
_LENGTH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
# Beyond 8,191 positions, and unless the position is a power of two, by which products are exact.
_ANGLE_ERROR = 2.4e-7
_NEAR = 8191


@dataclass
class QueryRecorder:
    """Stand-in for attention metadata that records queries and keys, and passes values through.

    Attributes:
        num_actual_tokens: tokens of the run.
        queries, keys: per layer, float32 `[num_tokens, heads, head_size]`, in host memory; what
            rotates comes first. Keys are those that the layer reads, whichever has stored them.
        values: per layer, `[num_tokens, num_kv_heads, head_size]`.
    """

    num_actual_tokens: int
    # As layers with MLA see it: all tokens are a prompt's.
    num_decodes: ClassVar[int] = 0
    num_decode_tokens: ClassVar[int] = 0
    num_prefills: ClassVar[int] = 1
    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def record(
        self,
        layer: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Record a layer's query and key, and write its value to `output`.

        Args:
            layer: name of the layer.
            query, output: `[num_tokens, num_heads, head_size]`.
            key, value: `[num_tokens, num_kv_heads, head_size]`.
        """
        self.keys[layer] = key.detach().to("cpu", torch.float32, copy=True)
        self.values[layer] = value.detach().clone()
        return self._pass_through(layer, query, value, output)

    def record_shared(
        self, layer: str, query: torch.Tensor, source: str, output: torch.Tensor
    ) -> torch.Tensor:
        """Record a layer's query beside the key of an earlier layer, whose value is the output.

        Args:
            source: name of the earlier layer.
        """
        self.keys[layer] = self.keys[source]
        return self._pass_through(layer, query, self.values[source], output)

    def _pass_through(
        self, layer: str, query: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        self.queries[layer] = query.detach().to("cpu", torch.float32, copy=True)
        group = query.shape[1] // value.shape[1]
        output.copy_(value.repeat_interleave(group, dim=1).view_as(output))
        return output


@dataclass(frozen=True)
class LayerPositions:
    """Rotation that the probe proved of one layer; `max_error` is relative to the largest entry."""

    layer: str
    rotation: Rotation | None
    max_error: float

    def describe(self) -> dict[str, Any]:
        """The rotation as plain data, to travel between processes."""
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
    """Distinct rotations that the model's rotary modules declare.

    vLLM's modules hold a table of cosines and sines. Those of `transformers`, on which vLLM runs
    architectures that it has no own code for, hold frequencies and do not say how dims are
    paired: both ways are candidates, and the probe tells.

    Raises:
        UnsupportedModelError: a module that does not turn by a fixed angle per position.
    """
    rotations: dict[tuple[float, ...], Rotation] = {}
    for name, module in model.named_modules():
        if hasattr(module, "_compute_cos_sin_cache"):
            if not hasattr(module, "cos_sin_cache"):  # several tables, chosen by length
                raise _length_dependent_error(name)
            # Not the buffer `cos_sin_cache`: that one is rounded to the model's dtype.
            table = module._compute_cos_sin_cache()
            inv_freq = _frequencies(table, min(max_position, table.shape[0]), name)
            pairings = [module.is_neox_style]
        elif isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            if getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
                raise _length_dependent_error(name)
            inv_freq, pairings = module.inv_freq.double().cpu(), [True, False]
        else:
            continue
        for is_neox in pairings:
            rotation = Rotation(inv_freq=inv_freq, is_neox=is_neox)
            rotations.setdefault((is_neox, *inv_freq.tolist()), rotation)
    return list(rotations.values())


def _length_dependent_error(name: str) -> UnsupportedModelError:
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
        raise _length_dependent_error(name)
    return inv_freq


@torch.inference_mode()
def probe_positions(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    layers: Sequence[str],
    device: torch.device,
    before_run: Callable[[int], None] = lambda num_tokens: None,
    states: StateLayers | None = None,
    model_config: ModelConfig | None = None,
) -> list[LayerPositions]:
    """Find out, and prove, the rotation of every attention layer.

    Args:
        model: the loaded model; its attention layers run our backend.
        layers: names of its attention layers.
        before_run: called with the number of tokens before the model is run.
        states: its layers with states, which know no positions; None: it has none.
        model_config: configuration of the model; None: that of the engine's.

    Raises:
        UnsupportedModelError: a layer in which positions act in any other way.
    """
    config = model_config or vllm_config.model_config
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if states is not None:
        max_tokens = min(max_tokens, states.num_states - 1)

    def run(positions: Sequence[int]) -> list[QueryRecorder]:
        records = []
        for i in range(0, len(positions), max_tokens):
            part = positions[i : i + max_tokens]
            before_run(len(part))
            metadata = states.alone_metadata(len(part)) if states is not None else {}
            read = (layers, device, metadata)
            records.append(record_run(model, vllm_config, part, *read, model_config=config))
        return records

    candidates: list[Rotation | None] = [None, *declared_rotations(model, config.max_model_len)]
    positions = probed_positions(config.max_model_len)
    is_declared = scales_queries(config.hf_text_config)
    records = run(positions)
    found = []
    for layer in layers:
        vectors = _Vectors.of(layer, positions, records)
        found.append(_match(layer, candidates, vectors, config.dtype))
        unscaled = vectors.keys_only() if is_declared else vectors
        _refuse_scaled(unscaled, _LENGTH_TOLERANCE[config.dtype], run)
    return found


def probed_positions(max_model_len: int) -> list[int]:
    """Positions at which models are run: powers of two, the last one, and one in between."""
    powers = [1 << i for i in range(max_model_len.bit_length())]
    chosen = {0, *powers, 4099, max_model_len - 1}
    return sorted(p for p in chosen if p < max_model_len)


def record_run(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    positions: Sequence[int],
    layers: Sequence[str],
    device: torch.device,
    of_states: Mapping[str, object],
    token_ids: Sequence[int] | None = None,
    model_config: ModelConfig | None = None,
) -> QueryRecorder:
    """Run a token at each of the positions and record every layer's queries and keys.

    Args:
        layers: names of the attention layers, in which each token sees itself alone.
        of_states: metadata of layers with states.
        token_ids: one per position; None: a token of all of them.
        model_config: configuration of the model; None: that of the engine's.
    """
    config = model_config or vllm_config.model_config
    recorder = QueryRecorder(len(positions))
    last = config.get_vocab_size() - 1
    token_ids = [7] * len(positions) if token_ids is None else token_ids
    # Of the dtype that vLLM's runners give: a compiled model takes no other.
    tokens = torch.tensor(token_ids, dtype=torch.int32, device=device).clamp(max=last)
    metadata = {**dict.fromkeys(layers, recorder), **of_states}
    where = torch.tensor(positions, device=device)
    if rows := mrope_num_dims(config.hf_config):
        where = where.expand(rows, -1)  # as in text
    with set_forward_context(metadata, vllm_config, num_tokens=len(positions)):
        model(input_ids=tokens, positions=where)
    return recorder


@dataclass(frozen=True)
class _Vectors:
    """Queries and keys of a layer, float32 `[positions, heads, head_size]` each."""

    layer: str
    positions: Sequence[int]
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, layer: str, positions: Sequence[int], records: Sequence[QueryRecorder]) -> _Vectors:
        """Collect the vectors of a layer from records.

        Raises:
            UnsupportedModelError: the layer did not run.
        """
        if any(layer not in record.queries for record in records):
            raise UnsupportedModelError(
                "the layer did not run when a token was put through the model, so its positions "
                'cannot be verified; run this model without the plugin (VLLM_PLUGINS="")',
                parameter="model",
                value=layer,
            )
        queries = torch.cat([record.queries[layer] for record in records])
        keys = torch.cat([record.keys[layer] for record in records])
        return cls(layer, positions, (queries, keys))

    def keys_only(self) -> _Vectors:
        """Copy without the queries."""
        return _Vectors(self.layer, self.positions, self.parts[1:])

    def rotation_error(self, rotation: Rotation | None) -> float:
        """Largest deviation from the first position's vectors, rotated; lengths do not count.

        Infinite where a vector is no number.
        """
        worst = 0.0
        for vectors in self.parts:
            expected = vectors[:1].expand_as(vectors)
            if rotation is not None:
                cos_sin = rotation.cos_sin(torch.tensor(self.positions))
                expected = rotate(expected, cos_sin[:, None], rotation.is_neox)
            lengths = vectors.norm(dim=-1, keepdim=True) / expected.norm(dim=-1, keepdim=True)
            off = (expected * lengths.nan_to_num(1.0) - vectors).abs().amax((1, 2))
            largest = vectors.abs().amax((1, 2))
            errors = torch.where(largest > 0, off / largest, off) - self._slack(rotation)
            worst = max(worst, float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))
        return worst

    def _slack(self, rotation: Rotation | None) -> torch.Tensor:
        """Error of the model's float32 angles, float32 `[positions]`."""
        if rotation is None:
            return torch.zeros(len(self.positions))
        fastest = float(rotation.inv_freq.abs().max())
        is_exact = [p <= _NEAR or p & (p - 1) == 0 for p in self.positions]
        return torch.tensor(
            [0.0 if e else _ANGLE_ERROR * fastest * p
             for p, e in zip(self.positions, is_exact, strict=True)]
        )  # fmt: skip

    def first_scaled(self, tolerance: float) -> tuple[int, float] | None:
        """Index of the first position at which a vector changes its length, and the factor.

        None if all vectors are as long as at position 0.
        """
        for i in range(len(self.positions)):
            for vectors in self.parts:
                length, start = vectors[i].norm(dim=-1), vectors[0].norm(dim=-1)
                factors = length / start.clamp(min=1e-30)
                worst = float(factors[(factors - 1).abs().argmax()])
                if bool(start.max() > 0) and abs(worst - 1) > tolerance:
                    return i, worst
        return None


def _match(
    layer: str, candidates: Sequence[Rotation | None], vectors: _Vectors, dtype: torch.dtype
) -> LayerPositions:
    """Find the candidate by which the layer's queries and keys differ between positions."""
    errors = [vectors.rotation_error(candidate) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if errors[best] > _TOLERANCE[dtype]:
        raise UnsupportedModelError(
            "between two positions the queries of this layer do not differ by a rotation that "
            f"the model declares (closest: relative error {errors[best]:.2g}). Learned absolute "
            "positions and frequencies that depend on the length cannot be "
            'choreographed: run this model without the plugin (VLLM_PLUGINS="")',
            parameter="model",
            value=layer,
        )
    return LayerPositions(layer, candidates[best], errors[best])


def _refuse_scaled(
    vectors: _Vectors, tolerance: float, run: Callable[[Sequence[int]], list[QueryRecorder]]
) -> None:
    """Check that vectors do not change their length with the position.

    Raises:
        UnsupportedModelError: they do.
    """
    scaled = vectors.first_scaled(tolerance)
    if scaled is None:
        return
    index, factor = scaled
    below, first = vectors.positions[index - 1], vectors.positions[index]
    while first - below > 1:
        middle = (below + first) // 2
        at_middle = _Vectors.of(vectors.layer, [0, middle], run([0, middle]))
        if found := at_middle.first_scaled(tolerance):
            first, factor = middle, found[1]
        else:
            below = middle
    raise UnsupportedModelError(
        f"this layer scales its queries or keys by their position: from position {first} on, "
        f"there by {factor:.4g}, and the model's configuration does not say so. Such positions "
        "cannot be choreographed: start the engine with "
        f"max_model_len={first} or less, or run this model without the plugin "
        '(VLLM_PLUGINS="")',
        parameter="model",
        value=vectors.layer,
    )
