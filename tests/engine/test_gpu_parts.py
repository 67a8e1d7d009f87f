# SPDX-License-Identifier: Apache-2.0
"""The parts that only GPU engines use, one by one, with vLLM's real classes on CPU."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_choreo.engine.attention_choice import check_chosen, choose_kv_dtype, hook
from vllm_choreo.engine.plugin import configure_after
from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.gpu_backends import (
    ChoreoFlashAttentionBackend,
    ChoreoTritonBackend,
    ChoreoTritonMLABackend,
)
from vllm_choreo.engine.worker.gpu_worker import ChoreoGPUWorker
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch
from vllm_choreo.engine.worker.v1_runner import ChoreoDispatcher, ChoreoGPUModelRunner
from vllm_choreo.engine.worker.v2_graphs import ChoreoCudaGraphManager, PlannedGraphManager
from vllm_choreo.engine.worker.v2_runner import ChoreoGPUModelRunnerV2
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.ops import Layout
from vllm_choreo.ops.layout import write_kv

SIZES = [1, 2, 4, 8]
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
KIND = LayerKind(None, SHAPE, 512)


@pytest.fixture
def vllm_config(tiny_model_path: Callable[[str], Path], monkeypatch: Any) -> VllmConfig:
    """As vLLM makes it for an engine, before any plugin of ours has seen it."""
    # Not by VLLM_PLUGINS: then no engine of this process would have the plugin any more.
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    args = EngineArgs(str(tiny_model_path("llama")), dtype="float32", max_model_len=256)
    config = args.create_engine_config()
    config.scheduler_config.max_num_seqs = 4
    config.compilation_config.cudagraph_capture_sizes = SIZES
    config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
    return config


# -- CUDA graphs -----------------------------------------------------------------------------------


def test_runner_v1_chooses_no_full_graph_for_spans(vllm_config: VllmConfig) -> None:
    dispatcher = ChoreoDispatcher(vllm_config)
    dispatcher.initialize_cudagraph_keys(BOTH)
    modes = {}
    for dispatcher.max_mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        modes[dispatcher.max_mode.name] = [
            dispatcher.dispatch(3, uniform_decode=is_decode)[0].name for is_decode in (True, False)
        ]
    assert modes == {
        "FULL": ["FULL", "PIECEWISE"],
        "PIECEWISE": ["PIECEWISE", "PIECEWISE"],
        "NONE": ["NONE", "NONE"],
    }
    # With data parallelism the ranks agree on a mode first.
    mode, _ = dispatcher.dispatch(3, uniform_decode=True, valid_modes={CUDAGraphMode.NONE})
    assert mode == CUDAGraphMode.NONE


@pytest.mark.parametrize("mode", [BOTH, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL])
def test_runner_v2_chooses_no_full_graph_for_spans(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    manager = _manager(vllm_config, monkeypatch, mode)

    def choose(num_tokens: int, per_request: int | None) -> BatchExecutionDescriptor:
        return manager.dispatch(num_tokens, num_tokens, per_request, 0)

    assert choose(3, 1).cg_mode == CUDAGraphMode.FULL
    manager.max_mode = CUDAGraphMode.PIECEWISE
    chosen = choose(3, 1)
    if mode == BOTH:
        assert (chosen.cg_mode, chosen.num_tokens) == (CUDAGraphMode.PIECEWISE, 4)
    else:
        assert (chosen.cg_mode, chosen.num_tokens) == (CUDAGraphMode.NONE, 3)
        assert chosen.num_reqs == 3
    assert choose(9, None).cg_mode == CUDAGraphMode.NONE
    manager.max_mode = CUDAGraphMode.NONE
    assert (choose(3, 1).cg_mode, choose(3, 1).num_tokens) == (CUDAGraphMode.NONE, 3)
    manager.max_mode = CUDAGraphMode.FULL
    assert choose(3, 1).cg_mode == CUDAGraphMode.FULL, "later steps are not concerned"


def test_steps_of_one_query_each_take_graphs_of_their_own(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step allows it and there is one of its size; ordinary steps take vLLM's."""
    manager = _manager(vllm_config, monkeypatch, BOTH)
    full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    manager.planned = PlannedGraphManager(
        nullcontext, vllm_config, torch.device("cpu"), CUDAGraphMode.FULL_DECODE_ONLY, 1
    )
    assert manager.planned.num_requests == 4, "of max_num_seqs"
    replayed = []
    for one in (manager.planned, manager):
        one.graphs = {
            desc: SimpleNamespace(replay=partial(replayed.append, (one, desc)))
            for desc in one._capture_descs[full]
        }
        one.hidden_states = torch.zeros(8, 1)

    def choose(num_tokens: int, per_request: int | None) -> tuple[CUDAGraphMode, bool]:
        chosen = manager.dispatch(num_tokens, num_tokens, per_request, 0)
        if chosen.cg_mode == full:
            manager.run_fullgraph(chosen)
            assert replayed[-1] == (manager.planned if manager.is_planned else manager, chosen)
        return chosen.cg_mode, manager.is_planned

    manager.max_mode, manager.allows_planned = piecewise, True
    assert choose(3, 1) == (piecewise, False), "none is captured yet"
    manager.planned._graphs_captured = True
    assert choose(3, 1) == (full, True)
    assert choose(3, None) == (piecewise, False) and choose(5, 1) == (piecewise, False)
    manager.allows_planned = False
    assert choose(3, 1) == (piecewise, False)
    manager.max_mode = full
    assert choose(3, 1) == (full, False)
    manager.release_graphs()
    assert not manager.graphs and not manager.planned.graphs


def _manager(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> ChoreoCudaGraphManager:
    """As if its graphs had been captured."""
    import vllm.v1.worker.gpu.cudagraph_utils as module

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(module, "get_pp_group", lambda: group)
    platform = type(module.current_platform)
    pool = classmethod(lambda cls: None)
    monkeypatch.setattr(platform, "get_global_graph_pool", pool, raising=False)
    manager = ChoreoCudaGraphManager(vllm_config, torch.device("cpu"), mode, decode_query_len=1)
    manager._graphs_captured = True
    return manager


# -- configuration ---------------------------------------------------------------------------------

# Not 10.0: vLLM's backends of MLA for it ask for a CUDA build when they are imported.
_CAPABILITIES = [(8, 0), (8, 9), (9, 0), (12, 0)]


@pytest.mark.parametrize(
    ("layer", "capability", "expected"),
    [
        ({}, (9, 0), "FLASH_ATTN"),
        ({"dtype": torch.float16}, (8, 0), "FLASH_ATTN"),
        ({"dtype": torch.float16}, (7, 5), "TRITON_ATTN"),
        ({"dtype": torch.float32}, (9, 0), "TRITON_ATTN"),
        ({"has_sink": True}, (8, 0), "TRITON_ATTN"),
        ({"use_mm_prefix": True}, (9, 0), "TRITON_ATTN"),
        ({"head_size": 512}, (8, 0), "TRITON_ATTN"),
        ({}, (10, 0), "FLASH_ATTN"),
        *[({"head_size": 576, "use_mla": True}, at, "TRITON_MLA") for at in _CAPABILITIES],
    ],
)
def test_layers_choose_of_our_backends_what_vllm_allows(
    vllm_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    layer: dict[str, Any],
    capability: tuple[int, int],
    expected: str,
) -> None:
    platform = _cuda_platform(monkeypatch)
    hook(platform)
    vllm_config.scheduler_config.scheduler_cls = "vllm_choreo.engine.scheduler.scheduler.Any"
    asked = _asked(**layer)
    with set_current_vllm_config(vllm_config):
        found, reasons = platform.get_valid_backends(DeviceCapability(*capability), asked)
    assert min(found, key=lambda c: c.priority).backend == AttentionBackendEnum[expected]
    assert {c.backend.name for c in found} <= {"FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA"}
    assert all(said for _, said in reasons.values())


def test_layers_of_other_engines_choose_as_ever(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where an engine has run in this process, our hooks have made the configuration one of ours.
    vllm_config.scheduler_config.scheduler_cls = None
    platform = _cuda_platform(monkeypatch)
    before = platform.get_valid_backends(DeviceCapability(9, 0), _asked())
    hook(platform)
    for context in (nullcontext(), set_current_vllm_config(vllm_config)):
        with context:
            assert platform.get_valid_backends(DeviceCapability(9, 0), _asked()) == before


def _cuda_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of its own like vLLM's platform of GPUs, which the build for CPUs lacks parts of."""
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of CUDA builds"))
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 2)
    platforms = importlib.import_module("vllm.platforms.cuda")
    return type("Platform", (platforms.NonNvmlCudaPlatform,), {})


def _asked(**layer: Any) -> AttentionSelectorConfig:
    common = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    return AttentionSelectorConfig(**{**common, "block_size": None, **layer})


def test_the_users_choice_of_a_backend(vllm_config: VllmConfig) -> None:
    for taken in (None, AttentionBackendEnum.TRITON_ATTN):
        vllm_config.attention_config.backend = taken
        check_chosen(vllm_config)
        assert vllm_config.attention_config.backend == taken
    vllm_config.attention_config.backend = AttentionBackendEnum.FLASHINFER
    with pytest.raises(UnsupportedOptionError, match="FLASH_ATTN and TRITON_ATTN") as caught:
        check_chosen(vllm_config)
    assert caught.value.parameter == "attention_config.backend"


def test_declared_8_bits_are_16_on_gpus(
    vllm_config: VllmConfig, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    choose_kv_dtype(vllm_config)
    assert vllm_config.cache_config.cache_dtype == "auto", "nothing is declared"
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    vllm_config.model_config.hf_config.quantization_config = scheme
    with pytest.raises(UnsupportedOptionError, match="8 bits") as caught:
        choose_kv_dtype(vllm_config)
    assert (caught.value.parameter, caught.value.value) == ("dtype", "float32")
    vllm_config.model_config.dtype = torch.bfloat16
    choose_kv_dtype(vllm_config)
    assert vllm_config.cache_config.cache_dtype == "bfloat16"
    assert any("twice the memory" in r.getMessage() for r in caplog_vllm.records)


def test_worker_and_scheduler_of_a_gpu_engine(vllm_config: VllmConfig) -> None:
    vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    vllm_config.scheduler_config.async_scheduling = True
    configure_after(vllm_config)
    configure_after(vllm_config)  # another process gets the configuration as it is
    scheduler = resolve_obj_by_qualname(vllm_config.scheduler_config.scheduler_cls)
    assert scheduler.__name__ == "ChoreoAsyncScheduler"
    assert resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls) is ChoreoGPUWorker
    vllm_config.parallel_config.enable_dbo = True
    with pytest.raises(UnsupportedOptionError) as caught:
        configure_after(vllm_config)
    assert caught.value.parameter == "enable_dbo"


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_modes_without_piecewise_graphs_are_warned_of(
    vllm_config: VllmConfig, mode: CUDAGraphMode, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    vllm_config.compilation_config.cudagraph_mode = mode
    configure_after(vllm_config)
    warnings = [r.getMessage() for r in caplog_vllm.records if "cudagraph_mode" in r.getMessage()]
    if mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY):
        (warning,) = warnings
        assert f"cudagraph_mode={mode.name} " in warning and "eagerly" in warning
        assert "cudagraph_mode=FULL_AND_PIECEWISE" in warning
    else:
        assert not warnings


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers do not pass their lines on, and in tests drop most of them."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.WARNING)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("is_v2", "expected"), [(True, ChoreoGPUModelRunnerV2), (False, ChoreoGPUModelRunner)]
)
def test_the_runners_class_can_be_exchanged(is_v2: bool, expected: type) -> None:
    worker = ChoreoGPUWorker.__new__(ChoreoGPUWorker)
    worker.use_v2_model_runner = is_v2
    assert worker.runner_class is expected
    runner = (vllm_class := expected.__bases__[1]).__new__(vllm_class)
    runner.__class__ = worker.runner_class
    assert isinstance(runner, expected)


# -- backends --------------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[None]:
    from vllm.v1.attention.backends.registry import register_backend

    for name, path in ChoreoGPUWorker.backends.items():
        register_backend(name, path)
    yield
    for name in ChoreoGPUWorker.backends:
        name.clear_override()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChoreoFlashAttentionBackend, FlashAttentionBackend),
        (ChoreoTritonBackend, TritonAttentionBackend),
        (ChoreoTritonMLABackend, TritonMLABackend),
    ],
)
def test_backends_take_the_place_of_vllms(registry: None, ours: Any, theirs: Any) -> None:
    assert AttentionBackendEnum[ours.get_name()].get_class() is ours
    assert ours.get_name() == theirs.get_name()
    assert issubclass(ours.get_builder_cls(), theirs.get_builder_cls())
    assert ours.get_builder_cls()._cudagraph_support == theirs.get_builder_cls()._cudagraph_support
    assert issubclass(ours.get_impl_cls(), theirs.get_impl_cls())
    if not ours.is_mla():  # whose layers store keys themselves, before
        assert not ours.forward_includes_kv_cache_update, "keys are stored before queries read"
    assert ours.get_impl_cls().kernels == "triton"


@pytest.mark.parametrize("backend", [ChoreoFlashAttentionBackend, ChoreoTritonBackend])
def test_forward_over_spans(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent of 20 tokens and 3 own ones, seen one after another, are 23 tokens in a row."""
    size, heads, kv_heads, head_size = 16, 4, 2, 32
    impl = _impl(backend, heads, kv_heads, head_size, monkeypatch)
    assert impl.layout is Layout.SIDE_BY_SIDE
    impl.kernels = "reference"
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys, values, query = (random(23, n, head_size) for n in (kv_heads, kv_heads, heads))
    # As vLLM lays it out for FlashAttention: [block, slot, head, content].
    cache = torch.zeros(6, size, kv_heads, 2 * head_size).transpose(1, 2)
    slots = torch.cat([torch.arange(16) + 3 * size, torch.arange(4) + size, torch.arange(3) + 80])
    write_kv(cache, slots, keys, values, Layout.SIDE_BY_SIDE)
    batcher = SpanBatcher(size, [KIND])
    impl.prepare(batcher, KIND)
    batcher.update({"a": RequestSpans((0,), (20,), (0,), (0,), 32)}, [])
    table = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    loc, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([35], dtype=torch.int32)
    batcher.running = batcher.batch(StepBatch(["a"], loc, lens, table, lens))
    padded = torch.cat([query[20:], random(5, heads, head_size)])
    output = torch.full_like(padded, 7.0)
    impl.forward(None, padded, keys, values, cache, object(), output)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, keys, values)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(output[:3], expected[0].transpose(0, 1)[20:], atol=1e-5, rtol=1e-5)
    assert bool((output[3:] == 7.0).all()), "rows of padding are left alone"
    # Fused quantization of the output would not pass through our kernels.
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)


@pytest.mark.parametrize("backend", [ChoreoFlashAttentionBackend, ChoreoTritonBackend])
def test_ordinary_batches_go_to_vllm(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    impl = _impl(backend, 4, 2, 32, monkeypatch)
    stock = backend.__bases__[0].get_impl_cls()
    seen = []
    monkeypatch.setattr(stock, "forward", lambda *args, **kwargs: seen.append((args, kwargs)))
    arguments = [object() for _ in range(6)]
    output = torch.empty(0)
    prepared = SpanBatcher(16, [KIND])
    for impl.batcher in (None, prepared):
        impl.forward(*arguments, output=output, output_scale=None)
    assert seen == [((impl, *arguments, output), {"output_scale": None})] * 2


def _impl(
    backend: Any, heads: int, kv_heads: int, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    import vllm.v1.attention.backends.flash_attn as module

    # On CPU vLLM has no FlashAttention that could say.
    monkeypatch.setattr(module, "flash_attn_supports_quant_query_input", lambda: False)
    monkeypatch.setattr(module, "get_flash_attn_version", lambda **kwargs: 3)
    return backend.get_impl_cls()(
        num_heads=heads,
        head_size=head_size,
        scale=head_size**-0.5,
        num_kv_heads=kv_heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
