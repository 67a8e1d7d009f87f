# SPDX-License-Identifier: Apache-2.0
"""Models whose positions act in other ways than by rotation are refused at start, at any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.engines import start_engine, stop_engine
from vllm_choreo.engine import query_scaling
from vllm_choreo.engine.worker.probe import _Vectors
from vllm_choreo.errors import UnsupportedModelError
from vllm_choreo.ops import Rotation
from vllm_choreo.ops.reference import rotate

MAX_MODEL_LEN = 16_384
ORIGINAL = 8_192  # beyond it queries are scaled
_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65_536,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def test_vectors_that_are_no_numbers_are_no_rotation() -> None:
    rotation = Rotation(inv_freq=torch.ones(2, dtype=torch.float64), is_neox=True)
    good = rotate(torch.ones(3, 1, 4), rotation.cos_sin(torch.arange(3))[:, None], True)
    assert _Vectors("0", range(3), (good,)).rotation_error(rotation) < 1e-5
    for at in range(3):
        bad = good.clone()
        bad[at, 0, 1] = torch.nan
        for asked in (rotation, None):
            assert math.isinf(_Vectors("0", range(3), (good, bad)).rotation_error(asked))


def _mistral() -> transformers.PretrainedConfig:
    """As Ministral 3: queries grow with the logarithm of their position."""
    scaling = {"original_max_position_embeddings": ORIGINAL, "beta": 0.1}
    return transformers.MistralConfig(**_SIZES, sliding_window=None, llama_4_scaling=scaling)


def _llama4(**options: Any) -> transformers.PretrainedConfig:
    """A layer with RoPE and one without, of dense feed-forward networks."""
    return transformers.Llama4TextConfig(
        **_SIZES, intermediate_size_mlp=192, num_local_experts=2, interleave_moe_layer_step=3,
        no_rope_layers=[1, 0], architectures=["Llama4ForCausalLM"], **options,
    )  # fmt: skip


@pytest.fixture
def write_model(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    def write(config: transformers.PretrainedConfig) -> Path:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_path("llama"))
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return write


def _refusal(path: Path, **options: Any) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        stop_engine(start_engine(path, **options))
    assert caught.value.parameter == "model"
    assert 'VLLM_PLUGINS=""' in caught.value.message
    return caught.value


def test_queries_scaled_by_position_are_refused_where_nobody_says_so(
    write_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silently wrong beyond the original length otherwise, which no short text shows."""
    monkeypatch.setattr(query_scaling, "_DECLARED", ())
    path = write_model(_mistral())
    refused = _refusal(path, max_model_len=MAX_MODEL_LEN)
    assert "from position 8192 on, there by 1.069" in refused.message
    assert "max_model_len=8192 or less" in refused.message
    # The way out that it names.
    stop_engine(start_engine(path, max_model_len=ORIGINAL))


def test_layers_without_rope_that_scale_queries_are_probed(
    write_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has them scale in engines of more than 32,768 tokens."""
    path = write_model(_llama4(floor_scale=ORIGINAL, attention_chunk_size=None))
    options = {"max_model_len": 40_000, "num_gpu_blocks_override": 1300}
    stop_engine(start_engine(path, **options))
    monkeypatch.setattr(query_scaling, "_DECLARED", ())
    refused = _refusal(path, **options)
    assert "layers.1" in str(refused.value)
    assert "max_model_len=8191 or less" in refused.message


def test_chunked_attention_is_refused(write_model: Callable[..., Path]) -> None:
    config = _llama4(attention_chunk_size=64)
    refused = _refusal(write_model(config), disable_hybrid_kv_cache_manager=True)
    assert "chunks of 64 tokens" in refused.message
