# SPDX-License-Identifier: Apache-2.0
"""The dense oracle: what a choreographed call should give, computed without any project code.

A HuggingFace model in float32 encodes a message's tokens at explicit positions, over keys and
values that the oracle gathers from the parents' encodings and rotates itself, under an explicit
4D mask: every new token sees every parent token, and its own message causally; in layers with a
sliding window of W, of all these the tokens seen at most W - 1 positions to its left. That is the
definition of a call word for word, and nothing else: no blocks, no spans, no virtual sequence.

Angles are computed in float64 from the model's own `inv_freq`, hence with its own scaling, both
where HuggingFace rotates new tokens and where the oracle rotates cached keys. (HuggingFace's own
float32 angles are off by up to 1e-4 at position 1500, which moves these tests' log-probabilities
by 1.5e-4.) Scaling of the attention itself (YaRN) is part of the stored keys and is not applied
again.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from vllm_choreo.testing.models.tiny import model_class

# Model types whose rotary embedding pairs neighbouring components (2i, 2i+1) instead of the two
# halves (i, i + rotary_dim / 2).
_INTERLEAVED_TYPES = frozenset({"glm", "glm4", "gptj", "cohere", "cohere2", "deepseek_v2"})
# With MLA HuggingFace caches the latent in place of keys, and the rotated key, which all heads
# share, in place of values. Here the rotated one is the key. Of both it makes keys and values of
# each head.
_LATENT_TYPES = frozenset({"deepseek_v2", "deepseek_v3"})


@dataclass(frozen=True)
class Encoded:
    """A message as the oracle encoded it; immutable.

    Attributes:
        token_ids: the n tokens.
        position: position of the first token; keys are rotated to `position + i`.
        keys: one tensor per layer, float32 `[num_kv_heads, n, head_size]`; with MLA what rotates.
        values: one tensor per layer, float32 `[num_kv_heads, n, head_size]`; with MLA latents.
        logits: float32 `[n, vocab_size]`; row i predicts the token after token i.
    """

    token_ids: tuple[int, ...]
    position: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    logits: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def logprobs(self) -> torch.Tensor:
        """float32 `[n, vocab_size]`: log-softmax of `logits`."""
        return self.logits.log_softmax(dim=-1)


@dataclass(frozen=True)
class Parent:
    """Tokens `start … stop - 1` of `message`; the first of them is seen at position `offset`."""

    message: Encoded
    offset: int
    start: int
    stop: int

    def positions(self) -> torch.Tensor:
        """int64 `[stop - start]`: the positions at which the tokens are seen."""
        return torch.arange(self.stop - self.start) + self.offset


def whole(message: Encoded, offset: int) -> Parent:
    """All of `message`, its first token seen at `offset`."""
    return Parent(message, offset, 0, len(message))


def private_model_class(model_path: str | Path) -> type[transformers.PreTrainedModel]:
    """The causal language model class of the folder, from a fresh copy of its module.

    vLLM's Transformers backend decorates the HuggingFace classes of the whole process for its own
    compilation, after which they cannot be used without an engine. The copy stays untouched.
    """
    config = transformers.AutoConfig.from_pretrained(model_path)
    public = model_class(config)
    spec = importlib.util.find_spec(public.__module__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, public.__name__)


class Oracle:
    """Encodes messages densely with one HuggingFace model in float32 on CPU.

    Args:
        model_path: folder with `config.json` and the weights.
        dtype: dtype of the weights before they are cast to float32. bfloat16 gives the float32
            reference of an engine that runs in bfloat16.
    """

    # Whether messages stand at the positions at which their calls place them.
    stands_as_placed = True

    def __init__(self, model_path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        model = private_model_class(model_path).from_pretrained(
            model_path, dtype=dtype, attn_implementation="eager"
        )
        self.model = model.to(torch.float32).eval()
        config = self.model.config.get_text_config()
        # Without the last ones that read the keys of earlier layers.
        num_sharing = int(getattr(config, "num_kv_shared_layers", None) or 0)
        self.num_layers = int(config.num_hidden_layers) - num_sharing
        self._num_layers_of_text = int(config.num_hidden_layers)
        # Then a shift of everything changes the result.
        self.scales_queries = bool(getattr(config, "llama_4_scaling", None))
        self.interleaved = config.model_type in _INTERLEAVED_TYPES
        self.is_latent = config.model_type in _LATENT_TYPES
        self.uses_alibi = config.model_type == "bloom"
        if self.uses_alibi:
            # HuggingFace's BLOOM approximates GELU by tanh, vLLM's does not: up to 2e-3 in
            # log-probability between the two, on ordinary requests too. vLLM's is the subject.
            for block in self.model.transformer.h:
                block.mlp.gelu_impl = torch.nn.GELU()
        full = ["full_attention"] * self.num_layers
        self.layer_types = getattr(config, "layer_types", None) or full
        self.has_kinds = "sliding_attention" in self.layer_types
        # A window, but no kinds of layers: every layer has it.
        is_local = self.has_kinds or not getattr(config, "layer_types", None)
        self.window = getattr(config, "sliding_window", None) if is_local else None
        self.inv_freq = self._find_inv_freq()
        no_rope = getattr(config, "no_rope_layers", None) or [1] * self.num_layers
        self.layer_has_rope = [bool(self.inv_freq) and bool(flag) for flag in no_rope]

    @property
    def layers(self) -> torch.nn.ModuleList:
        """Layers of text; a model that takes pictures has others for these."""
        (layers,) = [
            module
            for module in self.model.modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == self._num_layers_of_text
        ]
        return layers

    def _find_inv_freq(self) -> dict[str | None, torch.Tensor]:
        """float64 `[rotary_dim / 2]` by kind of layer, None for all kinds; empty without RoPE.

        Also gives the rotary embedding its float64 angles.
        """
        found = [
            module
            for name, module in self.model.named_modules()
            if name.endswith("rotary_emb") and "visual" not in name
        ]
        if not found:
            return {}
        if len(found) > 1:
            raise ValueError(f"{len(found)} rotary embeddings in one model are not supported")
        (rotary,) = found
        names = {None: "", **{kind: f"{kind}_" for kind in set(self.layer_types)}}
        inv_freq = {
            kind: getattr(rotary, f"{prefix}inv_freq").to(torch.float64)
            for kind, prefix in names.items()
            if hasattr(rotary, f"{prefix}inv_freq")
        }
        is_doubled = self.model.config.model_type != "gpt_oss"
        is_complex = self.model.config.model_type == "deepseek_v2"

        def forward(
            x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
        ) -> tuple[torch.Tensor, ...] | torch.Tensor:
            angles = self._angles(position_ids, inv_freq[layer_type])
            if is_doubled and not is_complex:
                angles = torch.cat((angles, angles), dim=-1)
            scaling = getattr(rotary, f"{names[layer_type]}attention_scaling")
            if is_complex:
                unit = torch.polar(torch.ones_like(angles), angles)
                return (unit * scaling).to(torch.complex64)
            return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

        rotary.forward = forward
        return inv_freq

    def _angles(self, position_ids: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
        """float64 `[batch, n, rotary_dim / 2]`: angles of tokens.

        M-RoPE takes sections of its frequencies by three rows of positions, equal in text.
        """
        if position_ids.dim() == 2:
            return position_ids[..., None] * inv_freq
        sections = self.model.config.get_text_config().rope_parameters["mrope_section"]
        rows = [number % 3 for number, size in enumerate(sections) for _ in range(size)]
        return position_ids[rows].movedim(0, -1) * inv_freq

    def _position_ids(
        self, token_ids: Sequence[int], positions: torch.Tensor, pictures: Mapping[str, Any]
    ) -> torch.Tensor:
        """Positions as the model takes them, `[1, n]`, or `[3, 1, n]` with pictures and M-RoPE."""
        return positions[None]

    def num_positions(self, token_ids: Sequence[int], pictures: Sequence[Any] = ()) -> int:
        """Positions that a message takes, and its tokens without pictures."""
        return len(token_ids)

    def rotate(self, keys: torch.Tensor, delta: int, layer: int) -> torch.Tensor:
        """Rotate `keys` of a layer by `delta` further positions.

        Args:
            keys: float32 `[num_kv_heads, num_tokens, head_size]`; not changed.
            delta: in tokens, any sign.

        Returns:
            float32, same shape. Components from `rotary_dim` on are copied.
        """
        kind = self.layer_types[layer]
        inv_freq = self.inv_freq[kind if kind in self.inv_freq else None]
        rotary_dim = 2 * inv_freq.numel()
        angles = inv_freq * delta
        pairs = keys[..., :rotary_dim].to(torch.float64)
        if self.interleaved:
            first, second = pairs[..., 0::2], pairs[..., 1::2]
        else:
            first, second = pairs.chunk(2, dim=-1)
        rotated_first = first * angles.cos() - second * angles.sin()
        rotated_second = second * angles.cos() + first * angles.sin()
        if self.interleaved:
            rotated = torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)
        else:
            rotated = torch.cat((rotated_first, rotated_second), dim=-1)
        return torch.cat((rotated.to(keys.dtype), keys[..., rotary_dim:]), dim=-1)

    def as_stored(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys in the order of vLLM's components: HuggingFace takes DeepSeek V3's pairs apart."""
        if not self.is_latent or self.interleaved:
            return keys
        return torch.stack(keys.chunk(2, dim=-1), dim=-1).flatten(-2)

    def prompt(
        self, token_ids: Sequence[int], pictures: Sequence[Any] = ()
    ) -> tuple[tuple[int, ...], Mapping[str, torch.Tensor]]:
        """Tokens of a message with pictures, and what the model is given for these.

        Args:
            token_ids: tokens with a placeholder for each picture.
        """
        assert not pictures, "this oracle has no processor"
        return tuple(token_ids), {}

    def picture_inputs(self, pictures: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """Tensors that the model is given for pictures, in their order."""
        assert not pictures, "this oracle has no processor"
        return {}

    def _gather(self, parents: Sequence[Parent]) -> transformers.DynamicCache:
        """A cache that holds the parents' keys, each rotated to where it is seen, and values."""
        cache = transformers.DynamicCache()
        if not parents:
            return cache
        for layer in range(self.num_layers):
            keys, values = [], []
            for parent in parents:
                part = slice(parent.start, parent.stop)
                key = parent.message.keys[layer][:, part]
                if self.layer_has_rope[layer]:
                    seen_from = parent.message.position + parent.start
                    key = self.rotate(key, parent.offset - seen_from, layer)
                keys.append(key)
                values.append(parent.message.values[layer][:, part])
            found = torch.cat(keys, 1)[None], torch.cat(values, 1)[None]
            cache.update(*(reversed(found) if self.is_latent else found), layer)
        return cache

    def _mask(self, positions: torch.Tensor, key_positions: torch.Tensor) -> Any:
        """What HuggingFace adds to the scores, `[1, 1, num_queries, num_keys]`; by kind of layer
        where the model has several kinds.
        """
        num_tokens, num_keys = len(positions), len(key_positions)
        seen = torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(num_keys - num_tokens)
        near = seen
        if self.window is not None:
            near = seen & (positions[:, None] - key_positions[None, :] < self.window)
        full, sliding = (
            torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
            for mask in (seen, near)
        )
        if self.has_kinds:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def _alibi(self, positions: torch.Tensor, key_positions: torch.Tensor) -> Callable[..., object]:
        """A stand-in for the model's bias builder: slope times (key position - query position).

        It returns float32 `[num_heads, num_queries, num_keys]`.
        """
        num_heads = self.model.config.num_attention_heads
        unit = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
        slopes = unit[:, :, 1:]
        distances = (key_positions[None, :] - positions[:, None]).to(torch.float32)
        return lambda *args, **kwargs: slopes * distances

    @torch.no_grad()
    def encode(
        self,
        token_ids: Sequence[int],
        parents: Sequence[Parent] = (),
        new_offset: int = 0,
        pictures: Mapping[str, torch.Tensor] | None = None,
    ) -> Encoded:
        """Encode one message in the context of `parents`, its first token at `new_offset`.

        Args:
            pictures: what the model is given for the pictures among its tokens.
        """
        num_tokens = len(token_ids)
        positions = torch.arange(num_tokens) + new_offset
        key_positions = torch.cat([*(parent.positions() for parent in parents), positions])
        num_past = len(key_positions) - num_tokens
        if self.uses_alibi:
            self.model.transformer.build_alibi_tensor = self._alibi(positions, key_positions)
        cache = self._gather(parents)
        position_ids = self._position_ids(token_ids, positions, pictures or {})
        logits = self.model(
            input_ids=torch.tensor([list(token_ids)]),
            attention_mask=self._mask(positions, key_positions),
            past_key_values=cache,
            use_cache=True,
            # ALiBi models have no such argument: their positions are in the bias.
            **({} if self.uses_alibi else {"position_ids": position_ids}),
            **(pictures or {}),
        ).logits[0]
        keys = tuple(layer.keys[0, :, num_past:] for layer in cache.layers)
        values = tuple(layer.values[0, :, num_past:] for layer in cache.layers)
        if self.is_latent:
            keys, values = values, keys
        return Encoded(tuple(token_ids), new_offset, keys, values, logits)

    def repair(
        self, parents: Sequence[Parent], runs: Sequence[Sequence[tuple[int, int]]]
    ) -> list[Parent]:
        """What a call that repairs `runs` of its parents reads, by the definition of repair.

        Token `l` of parent j, counted from the first that the call sees, is encoded anew at
        `offset + l`; it attends to the parents before, repaired, and to tokens `0 … l` of its own,
        the repaired ones in place of the stored. All others are as stored.
        """
        chain: list[Parent] = []
        for parent, of_parent in zip(parents, runs, strict=True):
            message = parent.message
            for first, last in of_parent:
                start, stop = parent.start + first, parent.start + last
                before = Parent(message, parent.offset, parent.start, start)
                read = [*chain, before] if first else chain
                anew = self.encode(message.token_ids[start:stop], read, parent.offset + first)
                message = self._overwritten(message, start, anew)
            chain.append(Parent(message, parent.offset, parent.start, parent.stop))
        return chain

    def _overwritten(self, message: Encoded, start: int, anew: Encoded) -> Encoded:
        """`message` with the keys and values of `anew` from token `start` on."""
        part = slice(start, start + len(anew))
        keys, values = [], []
        for layer in range(self.num_layers):
            key, value = message.keys[layer].clone(), message.values[layer].clone()
            new_key = anew.keys[layer]
            if self.layer_has_rope[layer]:
                new_key = self.rotate(new_key, message.position + start - anew.position, layer)
            key[:, part], value[:, part] = new_key, anew.values[layer]
            keys.append(key)
            values.append(value)
        return replace(message, keys=tuple(keys), values=tuple(values))

    def decode(
        self, header: Sequence[int], parents: Sequence[Parent], new_offset: int, num_tokens: int
    ) -> Encoded:
        """Greedily generate `num_tokens` after `header`, without stopping at end of sequence.

        Returns:
            The message: header and all generated tokens.
        """
        token_ids = list(header)
        for _ in range(num_tokens):
            logits = self.encode(token_ids, parents, new_offset).logits
            token_ids.append(int(logits[-1].argmax()))
        return self.encode(token_ids, parents, new_offset)

    @torch.no_grad()
    def plain_logits(
        self, token_ids: Sequence[int], pictures: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """float32 `[n, vocab_size]`: an ordinary forward pass, with no mask, cache or positions."""
        if self.uses_alibi:
            self.model.transformer.__dict__.pop("build_alibi_tensor", None)
        ids = torch.tensor([list(token_ids)])
        return self.model(input_ids=ids, use_cache=False, **(pictures or {})).logits[0]


# Closer than this, the oracle's best two tokens are a tie: kernels add in another order.
TIE = 1e-3


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    """Token ids of a tiny model, special ones left out."""
    return [rng.randrange(3, 512) for _ in range(num_tokens)]


def assert_greedy(message: Any, oracle: Oracle, parents: Sequence[Parent], new_offset: int) -> None:
    """Every generated token of a `Message` is the oracle's, given the tokens before it."""
    num_header = message.num_tokens - len(message.generated_token_ids)
    assert_choices(oracle.encode(message.token_ids, parents, new_offset), num_header)


def assert_choices(encoded: Encoded, num_header: int) -> None:
    """The tokens of a message after its first `num_header` are the ones that its logits choose."""
    for i, token in enumerate(encoded.token_ids[num_header:], num_header):
        logits = encoded.logits[i - 1]
        assert logits.max() - logits[token] < TIE
