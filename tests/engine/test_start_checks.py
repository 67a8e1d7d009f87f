# SPDX-License-Identifier: Apache-2.0
"""Checks at the start of an engine: what would pass our layers or routes by is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.attention_choice import check_chosen
from vllm_choreo.engine.graphs import check_full_graphs
from vllm_choreo.engine.plugin import _check_composed_states, configure_after
from vllm_choreo.engine.worker.cpu_backend import ChoreoCPUBackend, ChoreoCPUImpl
from vllm_choreo.engine.worker.gpu_backends import ChoreoFlashAttentionBackend, ChoreoTritonBackend
from vllm_choreo.engine.worker.layer_checks import check_layer, check_seen, check_shared_memory
from vllm_choreo.errors import UnsupportedModelError, UnsupportedOptionError


def _config(**parts: Any) -> Any:
    model = SimpleNamespace(runner_type="generate", is_encoder_decoder=False)
    return SimpleNamespace(
        model_config=model,
        parallel_config=None,
        speculative_config=None,
        additional_config={},
        **parts,
    )


def test_the_front_end_in_rust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedOptionError) as caught:
        configure_after(_config())
    assert caught.value.parameter == "VLLM_USE_RUST_FRONTEND"


@pytest.mark.parametrize(("is_hybrid", "on_cpu"), [(False, True), (True, False), (True, True)])
def test_composed_states(is_hybrid: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need states, and a device on which they were run."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    vllm_config = _config()
    vllm_config.model_config.is_hybrid = is_hybrid
    if is_hybrid and on_cpu:
        _check_composed_states(vllm_config, ChoreoConfig(composed_states=True))
        return
    with pytest.raises(UnsupportedOptionError, match="leave it out") as caught:
        _check_composed_states(vllm_config, ChoreoConfig(composed_states=True))
    assert caught.value.parameter == "additional_config.choreo.composed_states"
    _check_composed_states(vllm_config, ChoreoConfig())


_GRAPHS = {
    "there are no CUDA graphs on CPUs": {"on_cpu": True},
    "enforce_eager": {"enforce_eager": True},
    "runner V1": {"use_v2_model_runner": False},
    "states": {"is_hybrid": True},
    "speculate": {"speculative_config": "set"},
    "LoRA": {"lora_config": "set"},
    "data parallelism": {"data_parallel_size": 2},
}


@pytest.mark.parametrize("reason", [None, *_GRAPHS])
def test_full_graphs(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused where nothing would capture, or nobody has tried."""
    given = {
        "on_cpu": False, "enforce_eager": False, "use_v2_model_runner": True, "is_hybrid": False,
        "speculative_config": None, "lora_config": None, "data_parallel_size": 1,
        **(_GRAPHS[reason] if reason else {}),
    }  # fmt: skip
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: given["on_cpu"])
    vllm_config = _config()
    for name in ("use_v2_model_runner", "speculative_config", "lora_config"):
        setattr(vllm_config, name, given[name])
    for name in ("enforce_eager", "is_hybrid"):
        setattr(vllm_config.model_config, name, given[name])
    parallel = SimpleNamespace(data_parallel_size=given["data_parallel_size"])
    vllm_config.parallel_config = parallel
    check_full_graphs(vllm_config, ChoreoConfig())
    if reason is None:
        check_full_graphs(vllm_config, ChoreoConfig(full_cuda_graphs=True))
        return
    with pytest.raises(UnsupportedOptionError, match=f"{reason}.*piecewise graphs") as caught:
        check_full_graphs(vllm_config, ChoreoConfig(full_cuda_graphs=True))
    assert caught.value.parameter == "additional_config.choreo.full_cuda_graphs"


@pytest.mark.parametrize("name", ["TRITON_FLASH_ATTN", "TRITON_FLASHINFER"])
def test_composite_backends(name: str) -> None:
    chosen = SimpleNamespace(backend=AttentionBackendEnum[name])
    with pytest.raises(UnsupportedOptionError, match="FLASH_ATTN and TRITON_ATTN") as caught:
        check_chosen(_config(attention_config=chosen))
    assert caught.value.parameter == "attention_config.backend"


class _OwnAttention:
    """A layer of a model that does not use vLLM's `Attention`."""


def test_layers_of_a_class_of_their_own() -> None:
    """Families of models whose layers are written for one vendor."""
    layers = {"model.layers.0": object(), "model.layers.1": _OwnAttention()}
    groups = [SimpleNamespace(layer_names=list(layers))]
    cache: Any = SimpleNamespace(kv_cache_groups=groups)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    found: Any = {"model.layers.0": layers["model.layers.0"]}
    with pytest.raises(UnsupportedModelError, match="_OwnAttention") as caught:
        check_seen(cache, config, found)
    assert caught.value.value == "model.layers.1"
    check_seen(cache, config, layers)


def test_keys_that_a_model_stores_itself() -> None:
    layer: Any = SimpleNamespace(
        impl=object.__new__(ChoreoCPUImpl),
        attn_backend=SimpleNamespace(supports_kv_cache_update_bypass=True),
        kv_sharing_target_layer_name=None,
        kv_cache=SimpleNamespace(shape=(9, 2, 32, 64)),
    )
    with pytest.raises(UnsupportedModelError, match="stores itself"):
        check_layer("model.layers.0", layer, 32)
    for backend in (ChoreoCPUBackend, ChoreoFlashAttentionBackend, ChoreoTritonBackend):
        layer.attn_backend = backend
        check_layer("model.layers.0", layer, 32)


def test_layers_that_lie_over_one_another_look_alike() -> None:
    cache = torch.zeros(4, 2, 32, 64)
    check_shared_memory({"full": cache, "near": cache.view(4, 2, 32, 64), "other": torch.zeros(3)})
    with pytest.raises(UnsupportedModelError, match="window_groups") as caught:
        check_shared_memory({"full": cache, "near": cache.view(4, 1, 32, 128)})
    assert caught.value.value == "near"
