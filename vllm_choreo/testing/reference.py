# SPDX-License-Identifier: Apache-2.0
"""HuggingFace's answer to a choreographed call, with no rotation of anybody's.

A key at another position is had by encoding the message anew with everything that it attends to
shifted along, which by definition changes nothing else: HuggingFace places the keys itself.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    # `(key, value)` per layer, float32 `[1, num_kv_heads, n, head_size]`.
    _KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]

# Where HuggingFace's two best tokens are closer than this, either is right.
TIE = 1e-3


@dataclass(frozen=True, eq=False)
class Made:
    """A message as it was asked for, to be encoded by HuggingFace.

    Attributes:
        token_ids: given and generated ones.
        parents: `(message, start, stop, offset)`.
        new_offset: position of its first token.
    """

    token_ids: Sequence[int]
    parents: tuple[tuple[Made, int, int, int], ...] = ()
    new_offset: int = 0


class Reference:
    """HuggingFace's model of a folder or name, in float32 on CPU.

    Raises:
        ChoreoError: its model takes no positions.
    """

    def __init__(self, model: str) -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        found = _untouched_class(model).from_pretrained(
            model, dtype="float32", attn_implementation="eager"
        )
        self._model = found.eval()
        if "position_ids" not in inspect.signature(self._model.forward).parameters:
            raise ChoreoError(
                "HuggingFace's model takes no positions, so its answers cannot be compared; the "
                "probe is all that can be said of it",
                parameter="model",
                value=Path(model).name,
            )
        self._memo: dict[tuple[Made, int], tuple[_KeysAndValues, torch.Tensor]] = {}

    def logits(self, made: Made) -> torch.Tensor:
        """A message's logits, float32 `[n, vocab_size]`; row i predicts the token after token i."""
        return self._encode(made, made.new_offset)[1]

    def text_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of a text in one pass, float32 `[n, vocab_size]`; also of models with states."""
        import torch

        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=torch.tensor([list(token_ids)])).logits[0]
        return logits

    def forget(self) -> None:
        """Let go of what was encoded so far."""
        self._memo.clear()

    def _encode(self, made: Made, at: int) -> tuple[_KeysAndValues, torch.Tensor]:
        """Encode a message and all that it attends to, shifted so that it begins at position `at`.

        Returns:
            Its keys and values, and its logits.
        """
        import torch
        from transformers import DynamicCache

        if (made, at) in self._memo:
            return self._memo[made, at]
        cache, shift = DynamicCache(), at - made.new_offset
        num_past, seen = 0, []
        for parent, start, stop, offset in made.parents:
            encoded, _ = self._encode(parent, offset + shift - start)
            for layer, (key, value) in enumerate(encoded):
                cache.update(key[:, :, start:stop], value[:, :, start:stop], layer)
            num_past += stop - start
            seen.append(torch.arange(stop - start) + offset + shift)
        tokens = torch.tensor([list(made.token_ids)])
        positions = torch.arange(at, at + tokens.shape[1])
        with torch.inference_mode():
            logits = self._model(
                input_ids=tokens,
                attention_mask=self._masks(positions, torch.cat([*seen, positions])),
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
        layers = cache.layers
        own = [(layer.keys[:, :, num_past:], layer.values[:, :, num_past:]) for layer in layers]
        self._memo[made, at] = own, logits
        return own, logits

    def _masks(
        self, positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks to add to the scores, `[1, 1, n, num_keys]`; by kind of layer if there are kinds.

        Args:
            positions: int64 `[n]`, positions of the new tokens, which are the last keys, too.
            key_positions: int64 `[num_keys]`, positions where the keys are seen.
        """
        import torch

        config = self._model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        num_past = len(key_positions) - len(positions)
        visible = torch.ones(len(positions), len(key_positions), dtype=torch.bool).tril(num_past)
        masks = {"full_attention": visible}
        if window is not None:
            near = positions[:, None] - key_positions[None] < window
            masks["sliding_attention"] = visible & near
        least = torch.finfo(torch.float32).min
        added = {
            kind: torch.zeros(mask.shape).masked_fill(~mask, least)[None, None]
            for kind, mask in masks.items()
        }
        if kinds and "sliding_attention" in kinds:
            return added
        return added["full_attention"] if kinds else list(added.values())[-1]


def num_unlike_greedy(logits: torch.Tensor, num_given: int, generated: Sequence[int]) -> int:
    """Number of generated tokens that are neither the reference's best, nor tie with it.

    Args:
        logits: float32 `[n, vocab_size]`, logits of given and generated tokens.
        num_given: tokens before the generated ones.
    """
    return sum(
        bool(logits[num_given + i - 1].max() - logits[num_given + i - 1][token] > TIE)
        for i, token in enumerate(generated)
    )


def _untouched_class(model: str) -> type[PreTrainedModel]:
    """HuggingFace's class of the model, from a fresh copy of its module.

    Where vLLM runs a model on HuggingFace's own classes, it decorates them for its compilation,
    after which they work within an engine alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    public = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(model))]
    spec = importlib.util.find_spec(public.__module__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[PreTrainedModel] = getattr(module, public.__name__)
    return found
