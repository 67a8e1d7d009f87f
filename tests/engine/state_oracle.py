# SPDX-License-Identifier: Apache-2.0
"""The dense oracle of models with states: what calls give that read messages in any order.

Keys and values are those of `Oracle`. To every state a message does one linear thing,
`S -> A S + B`: the oracle takes from HuggingFace's layers what `A` is made of, token by token
(the gate of Mamba2; keys, gates and decays of a delta rule; that a convolution remembers its
last inputs), multiplies it out in float64, and finds `B` from the states before and behind the
message. A call begins with `(... (A_1 0 + B_1) ...)`, composed in the order of its parents. That
is the definition word for word; no code of the project is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.oracle import Encoded, Oracle, Parent, whole

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps behind a token.

    Attributes:
        inputs: last inputs of its convolution, `[channels, kernel_size]`.
        memory: float64 `[heads, rows, columns]`; None: it is a convolution alone.
    """

    inputs: torch.Tensor
    memory: torch.Tensor | None


@dataclass(frozen=True)
class Change:
    """What the tokens of a message do to the state of a layer.

    Attributes:
        inputs: their own inputs of the convolution, as far as it remembers, `[channels, n]`.
        a: float64 `[heads, rows, rows]`; None: there is no memory.
        b: float64 `[heads, rows, columns]`.
    """

    inputs: torch.Tensor
    a: torch.Tensor | None
    b: torch.Tensor | None

    def __call__(self, state: LayerState) -> LayerState:
        size = state.inputs.shape[-1]
        inputs = torch.cat((state.inputs, self.inputs), dim=-1)[:, -size:]
        if self.a is None or self.b is None or state.memory is None:
            return LayerState(inputs, None)
        return LayerState(inputs, self.a @ state.memory + self.b)


@dataclass(frozen=True)
class StateEncoded(Encoded):
    """A message of a model with states.

    Attributes:
        changes: of the layers with states, by their numbers.
        context: what it was encoded behind.
    """

    changes: dict[int, Change]
    context: tuple[Parent, ...]


class StateOracle(Oracle):
    """The dense oracle of a HuggingFace model some of whose layers have states.

    Args:
        in_steps: whether tokens are run one by one, in the recurrent form; else in HuggingFace's
            chunked form.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: torch.dtype = torch.float32,
        *,
        in_steps: bool = False,
    ) -> None:
        super().__init__(model_path, dtype)
        self.in_steps = in_steps
        self.layer_types = self.model.config.layer_types
        layers = self.model.model.layers
        self._mixers: dict[int, torch.nn.Module] = {}
        for number, kind in enumerate(self.layer_types):
            if kind != "full_attention":
                names = ("mamba", "linear_attn", "conv")
                (mixer,) = (getattr(layers[number], n) for n in names if hasattr(layers[number], n))
                self._mixers[number] = mixer
        self.layer_has_rope = [n not in self._mixers for n in range(self.num_layers)]

    # -- states ----------------------------------------------------------------------------

    def _nothing(self, number: int) -> LayerState:
        """The state of a layer before any token."""
        mixer = self._mixers[number]
        conv = getattr(mixer, "conv1d", None) or mixer.conv
        inputs = torch.zeros(conv.in_channels, conv.kernel_size[0])
        if hasattr(mixer, "head_dim"):  # Mamba2
            shape = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
        elif hasattr(mixer, "head_k_dim"):
            shape = (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
        else:
            return LayerState(inputs, None)
        return LayerState(inputs, torch.zeros(shape, dtype=torch.float64))

    def composed(self, parents: Sequence[Parent]) -> dict[int, LayerState]:
        """The states with which a call begins that reads whole messages in this order."""
        found: dict[int, LayerState] = {}
        for number in self._mixers:
            state = self._nothing(number)
            for parent in parents:
                message = parent.message
                assert isinstance(message, StateEncoded), "all messages are of this oracle"
                assert parent.stop - parent.start == len(message), "no part has a state"
                state = message.changes[number](state)
            found[number] = state
        return found

    # -- of the base class -----------------------------------------------------------------

    def _gather(self, parents: Sequence[Parent]) -> transformers.DynamicCache:
        cache = transformers.DynamicCache(config=self.model.config)
        for layer in range(self.num_layers) if parents else ():
            if layer in self._mixers:
                continue
            keys, values = [], []
            for parent in parents:
                delta = parent.offset - parent.message.position
                keys.append(self.rotate(parent.message.keys[layer], delta, layer))
                values.append(parent.message.values[layer])
            cache.update(torch.cat(keys, 1)[None], torch.cat(values, 1)[None], layer)
        for number, state in self.composed(parents).items() if parents else ():
            layer = cache.layers[number]
            memory = None if state.memory is None else state.memory.float()[None]
            layer.lazy_initialization(state.inputs[None], memory)
            layer.conv_states[0].copy_(state.inputs[None])
            if memory is not None:
                layer.recurrent_states[0].copy_(memory)
            layer.has_previous_state[0] = True
        return cache

    def _mask(self, positions: torch.Tensor, key_positions: torch.Tensor) -> Any:
        full = super()._mask(positions, key_positions)
        return {**dict.fromkeys(self.layer_types), "full_attention": full}

    @torch.no_grad()
    def encode(
        self, token_ids: Sequence[int], parents: Sequence[Parent] = (), new_offset: int = 0
    ) -> StateEncoded:
        """Encode one message behind the composed states of `parents`."""
        before = self.composed(parents)
        cache, num_past = self._gather(parents), sum(len(p.message) for p in parents)
        positions = torch.arange(len(token_ids)) + new_offset
        seen = torch.cat([*(parent.positions() for parent in parents), positions])
        step = 1 if self.in_steps else max(1, len(token_ids))
        rows, maps = [], _Maps(self._mixers)
        with maps.recording():
            for i in range(0, len(token_ids), step):
                part = positions[i : i + step]
                rows.append(
                    self.model(
                        input_ids=torch.tensor([list(token_ids[i : i + step])]),
                        attention_mask=self._mask(part, seen[: num_past + i + len(part)]),
                        past_key_values=cache,
                        use_cache=True,
                        position_ids=part[None],
                    ).logits[0]
                )
        changes = {
            number: self._change(number, before[number], cache.layers[number], maps, len(token_ids))
            for number in self._mixers
        }
        empty = torch.zeros(0)
        kept = [
            (empty, empty)
            if number in self._mixers
            else (layer.keys[0, :, num_past:], layer.values[0, :, num_past:])
            for number, layer in enumerate(cache.layers)
        ]
        keys, values = zip(*kept, strict=True)
        return StateEncoded(
            tuple(token_ids), new_offset, keys, values, torch.cat(rows), changes, (*parents,)
        )

    def repair(
        self, parents: Sequence[Parent], runs: Sequence[Sequence[tuple[int, int]]]
    ) -> list[Parent]:
        """What a call reads that repairs first tokens of its parents, by the definition of that.

        They are encoded anew behind the parents before, repaired. The tokens behind them are as
        they were, and do to a state what they do to any.
        """
        chain: list[Parent] = []
        for parent, of_parent in zip(parents, runs, strict=True):
            message, offset = parent.message, parent.offset
            if not of_parent:
                chain.append(parent)
                continue
            ((start, count),) = of_parent
            assert not start and isinstance(message, StateEncoded)
            first, rest = message.token_ids[:count], message.token_ids[count:]
            chain.append(whole(self.encode(first, chain, offset), offset))
            if rest:
                was = self.encode(first, message.context, message.position)
                behind = [*message.context, whole(was, message.position)]
                chain.append(
                    whole(self.encode(rest, behind, message.position + count), offset + count)
                )
        return chain

    def _change(
        self, number: int, before: LayerState, layer: Any, maps: _Maps, num_tokens: int
    ) -> Change:
        inputs = layer.conv_states[0][0]
        inputs = inputs[:, -min(num_tokens, inputs.shape[-1]) :].clone()
        if before.memory is None:
            return Change(inputs, None, None)
        behind = layer.recurrent_states[0][0].double()
        a = maps.product(number, behind.shape[1])
        return Change(inputs, a, behind - a @ before.memory)


class _Maps:
    """Recorder of what each token does to what was there before it, in float64."""

    def __init__(self, mixers: dict[int, torch.nn.Module]) -> None:
        self._mixers = mixers
        self._by_layer: dict[int, list[tuple[torch.Tensor, ...]]] = {n: [] for n in mixers}

    def product(self, number: int, size: int) -> torch.Tensor:
        """`[heads, size, size]`, of all tokens of a layer with a memory."""
        found = None
        for decay, key, beta in self._by_layer[number]:
            a = torch.eye(size, dtype=torch.float64)
            if key.numel():
                a = a - beta[:, None, None] * key[:, :, None] * key[:, None, :]
            a = decay[:, None, None] * a
            found = a if found is None else a @ found
        assert found is not None, "it has tokens"
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what tokens do that are run within."""
        handles, patched = [], []
        for number, mixer in self._mixers.items():
            if hasattr(mixer, "dt_bias") and not hasattr(mixer, "head_k_dim"):
                handles.append(mixer.in_proj.register_forward_hook(self._mamba(number)))
            elif hasattr(mixer, "head_k_dim"):
                handles.append(mixer.register_forward_pre_hook(self._enter(number)))
        if any(hasattr(mixer, "head_k_dim") for mixer in self._mixers.values()):
            mixer = next(iter(self._mixers.values()))
            names = inspect.unwrap(type(mixer).forward).__globals__
            patched = [(names, rule, names[rule]) for rule in _RULES]
            for _, rule, original in patched:
                names[rule] = self._delta_rule(original)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for names, rule, original in patched:
                names[rule] = original

    def _mamba(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, projected: torch.Tensor) -> None:
            mixer = self._mixers[number]
            dt = projected[0, :, -mixer.num_heads :].double() + mixer.dt_bias.double()
            decay = (-mixer.A_log.double().exp() * torch.nn.functional.softplus(dt)).exp()
            nothing = torch.zeros(0, dtype=torch.float64)
            self._by_layer[number] += [(row, nothing, nothing) for row in decay]

        return hook

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            self._running = number

        return hook

    def _delta_rule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
            keys = key[0].double()
            keys = keys * (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            each = zip(g[0].double().exp(), keys, beta[0].double(), strict=True)
            self._by_layer[self._running] += each
            return original(query, key, value, g=g, beta=beta, **kwargs)

        return rule
