# SPDX-License-Identifier: Apache-2.0
"""Layers with states that are followed: what a request's tokens do to any state is kept beside it.

vLLM's layers say nothing of that, and their kernels compute what it takes inside. It is seen where
they call methods of their own, within the custom operators that compilation leaves alone: Mamba2's
`conv_ssm_forward` is given the gates, a delta rule's `rearrange_mixed_qkv` makes the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import cast

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_choreo.engine.worker.state_transitions import (
    Decays,
    DeltaRules,
    FollowedTokens,
    Transitions,
)
from vllm_choreo.errors import UnsupportedModelError

_EPSILON = 1e-6  # of vLLM's kernels, where they give keys the length 1
_NOBODY = FollowedTokens((), (), ())

# Each class below is of layers that are followed. Of all of them:
#   choreo_tokens: tokens of the step that runs, whose effect on states is followed.
#   choreo_runs: list to which each run of the layer is added, as a function that runs it again on
#       the same inputs, from the states that there are then; None: it is not recorded.
# No mixin has them: instances could not be given the class.
_Runs = list[Callable[[], None]]


class FollowedShortConv(ShortConv):
    """Short convolution; what it remembers says what was done to it."""

    choreo_tokens: FollowedTokens = _NOBODY
    choreo_runs: _Runs | None = None

    def forward_native(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        if self.choreo_runs is not None:
            run = super().forward_native
            self.choreo_runs.append(partial(run, hidden_states.clone(), output.clone()))
        super().forward_native(hidden_states, output)


class FollowedMixer2(MambaMixer2):
    """Mamba2 whose gates are followed."""

    choreo_gates: Decays
    choreo_tokens: FollowedTokens = _NOBODY
    choreo_runs: _Runs | None = None

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        if self.choreo_runs is not None:
            again = partial(self._follow, projected_states.clone(), output.clone())
            self.choreo_runs.append(again)
        self._follow(projected_states, output)

    def _follow(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        super().conv_ssm_forward(projected_states, output)
        if self.choreo_tokens.states:
            steps = projected_states[:, -self.tped_dt_size :].float() + self.dt_bias.float()
            self.choreo_gates.follow(self.choreo_tokens, self.A * softplus(steps))


class FollowedDeltaRule(QwenGatedDeltaNetAttention):
    """Gated delta rule whose keys are followed; on CPU, where its operator calls `follow`."""

    choreo_rules: DeltaRules
    choreo_tokens: FollowedTokens = _NOBODY
    choreo_runs: _Runs | None = None
    _keys: Sequence[torch.Tensor] = ()  # of the requests that decode, then of the others

    def rearrange_mixed_qkv(self, mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = super().rearrange_mixed_qkv(mixed_qkv)
        self._keys = (*self._keys, parts[1][0])
        return parts

    def follow(self, b: torch.Tensor, a: torch.Tensor) -> None:
        """Take in what the tokens of the step do, once it has run.

        Args:
            b, a: `[num_tokens, num_heads]`, of which the rule's gates are made.
        """
        keys, self._keys = self._keys, ()
        if not self.choreo_tokens.states:
            return
        found = torch.cat([*keys]).float()
        found = found * (found.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
        found = found.repeat_interleave(b.shape[-1] // found.shape[1], dim=1)
        decays = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        self.choreo_rules.follow(
            self.choreo_tokens, found.transpose(0, 1), decays.t(), b.float().sigmoid().t()
        )


def _follow_delta_rules() -> None:
    """Have vLLM's operator of gated delta rules on CPU tell layers that are followed."""
    original = gdn_attention._cpu_gdn_attention_nonspec
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def followed(
        layer: object,
        attn_metadata: object,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        if not isinstance(layer, FollowedDeltaRule):
            return original(layer, attn_metadata, mixed_qkv, b, a, core_attn_out)

        def run(*operands: torch.Tensor) -> None:
            original(layer, attn_metadata, *operands)
            layer.follow(*operands[1:3])

        operands = (mixed_qkv, b, a, core_attn_out)
        if layer.choreo_runs is not None:
            layer.choreo_runs.append(partial(run, *(operand.clone() for operand in operands)))
        run(*operands)

    gdn_attention._cpu_gdn_attention_nonspec = followed


class ComposedLayer:
    """States of one layer, and what was done to each since its request began.

    Args:
        layer: vLLM's layer, with all states under `kv_cache`: inputs of the convolution and,
            unless it is all there is, the memory. It is followed from now on.
    """

    def __init__(self, name: str, layer: MambaBase) -> None:
        self.name = name
        self._layer = layer
        self._inputs = layer.kv_cache[0]
        self._memory: torch.Tensor | None = None
        self._transitions: Transitions | None = None
        if isinstance(layer, ShortConv):
            layer.__class__ = FollowedShortConv
            return
        self._memory = layer.kv_cache[1]
        self._initial = torch.zeros_like(self._memory)
        num_states, num_heads, *_ = self._memory.shape
        device = self._memory.device
        if isinstance(layer, MambaMixer2):
            gates = Decays(num_states, num_heads, device)
            self._transitions = _follow_gates(layer, gates)
        else:
            _follow_delta_rules()
            rules = DeltaRules(num_states, num_heads, _key_size(layer), device)
            self._transitions = _follow_rules(layer, rules)

    @property
    def kept(self) -> list[torch.Tensor]:
        """All that is kept of states beside vLLM's own tensors, `[num_states, ...]` each."""
        return [] if self._transitions is None else [self._initial, self._transitions.tensor]

    def follow(self, tokens: FollowedTokens) -> None:
        """Follow these tokens when the layer runs next."""
        self._layer.choreo_tokens = tokens

    @contextmanager
    def recording(self) -> Iterator[_Runs]:
        """Record the runs of the layer within, see `choreo_runs`."""
        runs: _Runs = []
        self._layer.choreo_runs = runs
        try:
            yield runs
        finally:
            self._layer.choreo_runs = None

    def composed(
        self, behind: int | None, composed: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compose a state, see `StateStart`.

        Returns:
            Inputs of the convolution, and the memory, in float32, tensors of their own; None: the
            layer has none.
        """
        nothing = behind is None
        inputs = torch.zeros_like(self._inputs[0]) if nothing else self._inputs[behind].clone()
        for state, num_tokens in composed:
            inputs = _shifted(inputs, self._inputs[state], num_tokens)
        if self._memory is None or self._transitions is None:
            return inputs, None
        memory = torch.zeros_like(self._memory[0]) if nothing else self._memory[behind].clone()
        memory = memory.float()
        for state, _ in composed:
            # As it was, if it began with the same.
            change = self._transitions.applied(state, memory - self._initial[state].float())
            memory = self._memory[state].float() + change
        return inputs, memory

    def begin(self, target: int, inputs: torch.Tensor, memory: torch.Tensor | None) -> None:
        """Begin a state with what `composed` returns: nothing has been done to it."""
        self._inputs[target] = inputs
        if memory is None or self._memory is None or self._transitions is None:
            return
        self._memory[target] = memory.to(self._memory.dtype)
        self._initial[target] = self._memory[target]
        self._transitions.reset(target)


def _shifted(before: torch.Tensor, behind: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Last inputs behind a message: its own as far as it has as many, then what was before.

    Args:
        before, behind: a convolution's last inputs before the message, and in its own context.
    """
    axis = before.dim() - 1 if is_conv_state_dim_first() else 0
    size = before.shape[axis]
    if num_tokens >= size:
        return behind
    return torch.cat(
        (
            before.narrow(axis, num_tokens, size - num_tokens),
            behind.narrow(axis, size - num_tokens, num_tokens),
        ),
        dim=axis,
    )


def _follow_gates(layer: MambaMixer2, gates: Decays) -> Decays:
    followed = cast(FollowedMixer2, layer)
    followed.__class__ = FollowedMixer2
    followed.choreo_gates = gates
    return gates


def _follow_rules(layer: MambaBase, rules: DeltaRules) -> DeltaRules:
    followed = cast(FollowedDeltaRule, layer)
    followed.__class__ = FollowedDeltaRule
    followed.choreo_rules = rules
    return rules


def _key_size(layer: MambaBase) -> int:
    """Numbers of a key of a gated delta rule."""
    size: int = cast(QwenGatedDeltaNetAttention, layer).head_k_dim
    return size


def transition_bytes(name: str, layer: MambaBase) -> int:
    """Bytes that are kept of a state of a layer beside vLLM's own, so that it can be composed.

    Raises:
        UnsupportedModelError: it is not known what tokens do to states of such a layer.
    """
    if isinstance(layer, ShortConv):
        return 0
    is_known = isinstance(layer, (MambaMixer2, QwenGatedDeltaNetAttention))
    if not is_known or getattr(layer, "use_replayssm", False):
        raise UnsupportedModelError(
            f"layer {name} ({type(layer).__name__}) has states that are not composed in any order: "
            "Mamba2 (without replayed tokens), gated delta rules of Qwen, and short convolutions "
            "are; start the engine without additional_config.choreo.composed_states, and read "
            "chains",
            parameter="model",
            value=name,
        )
    shape, dtype = layer.get_state_shape()[1], layer.get_state_dtype()[1]
    rows = 1 if isinstance(layer, MambaMixer2) else _key_size(layer) ** 2
    return torch.Size(shape).numel() * dtype.itemsize + shape[0] * rows * 4
