# SPDX-License-Identifier: Apache-2.0
"""Properties that keys and values depend on besides recipes: the model, and how it is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.kv_dtype import kv_dtype
from vllm_choreo.trained_adapter import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# What recipes depend on: to another tokenizer the same numbers are other texts.
_OF_TEXT, _NUMBERS = "tokenizer", "vocabulary"
_OF_PICTURES = "processor"
# Differences of these alone make no other model.
_APART = ("name", _NUMBERS, _OF_PICTURES)
# Files of a model's folder that say how pictures become tensors, and how many tokens these take.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def signature(vllm_config: VllmConfig) -> dict[str, Any]:
    """Signature of an engine.

    Args:
        vllm_config: configuration of the engine.

    Returns:
        `name`, for a reader; `weights`, `tokenizer`, `vocabulary`: digests, see `ModelIdentity`;
        `architecture`; `dtype`, `kv_dtype`, `quantization`; `is_dummy`: the weights are drawn at
        random; `rotation`: the parameters of RoPE; `processor`: digest of what makes of pictures
        what the model is given, on which nothing else depends.
    """
    model = vllm_config.model_config
    base = _base_model(model.model)
    text = model.hf_text_config
    found = {
        "name": base.name,
        "weights": base.weights,
        _OF_TEXT: base.tokenizer,
        _NUMBERS: base.vocabulary,
        "architecture": list(getattr(model.hf_config, "architectures", None) or ()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": kv_dtype(vllm_config),
        "quantization": model.quantization,
        "is_dummy": str(vllm_config.load_config.load_format) == "dummy",
        "rotation": getattr(text, "rope_parameters", None),
        _OF_PICTURES: _processor(model),
    }
    # As it is read from a file: with lists for tuples, and texts for other objects.
    plain: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True, default=str))
    return plain


def _processor(model: ModelConfig) -> str | None:
    """Digest of a model's processor of pictures; None: it has none."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return None
    digest = blake2b(digest_size=16)
    digest.update(repr(multimodal.mm_processor_kwargs).encode())
    for name in _PROCESSOR_FILES:
        path = Path(model.model) / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return f"{model.model if not Path(model.model).is_dir() else ''}{digest.hexdigest()}"


@lru_cache(maxsize=8)
def _base_model(model: str) -> ModelIdentity:
    return ModelIdentity.of(model)


def differences(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Differences between the model whose keys were kept and that of an engine, in words."""
    names = [name for name in mine if name not in _APART]
    if kept.get("weights") or mine["weights"]:
        found = names
    else:  # nobody knows the weights: then the names must do
        found = ["name", *names]
    return [
        f"{name} ({_short(_entry(kept, name))}; here {_short(mine[name])})"
        for name in found
        if not _is_same(kept, mine, name)
    ]


def is_variant(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Return whether two models differ in their weights alone."""
    same = [name for name in mine if name not in ("weights", *_APART)]
    return all(_is_same(kept, mine, name) for name in same)


def is_same_text(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Return whether the numbers of tokens mean the same texts."""
    return _is_same(kept, mine, _OF_TEXT)


def _is_same(kept: Mapping[str, Any], mine: Mapping[str, Any], name: str) -> bool:
    """Return whether an entry is the same; the tokenizer is, if its tokens have the same numbers.

    Training writes a tokenizer's file anew, in other words.
    """
    if _entry(kept, name) == mine[name]:
        return True
    numbers = kept.get(_NUMBERS)
    return name == _OF_TEXT and bool(numbers) and numbers == mine.get(_NUMBERS)


def _entry(kept: Mapping[str, Any], name: str) -> object:
    """Entry of a signature; what was saved before it named one was of the model's dtype."""
    return kept.get(name, kept.get("dtype") if name == "kv_dtype" else None)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "…"
