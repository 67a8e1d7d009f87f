# SPDX-License-Identifier: Apache-2.0
"""Hooks by which choreography enters vLLM: in its command line and in its configuration.

Every vLLM name that is not public is reached from this package `engine`; `compat` checks that the
installed vLLM is a version for which they were read.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine import (
    attention_choice,
    batch_runner,
    command_line,
    cpu_kernels,
    graphs,
    mla,
)
from vllm_choreo.engine.compat import check_version
from vllm_choreo.engine.orphan import end_with_parent
from vllm_choreo.engine.speculation import check_speculation, has_layers
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.kv_dtype import adopt_declared, quantized_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms import Platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = logging.getLogger(__name__)

# The smallest block that vLLM's CPU kernel takes at full speed: less padding per message.
CPU_BLOCK_SIZE = 32

_ENGINE = "vllm_choreo.engine"
# Ours, by the worker that vLLM's platforms name.
_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_ENGINE}.worker.cpu_worker.ChoreoCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{_ENGINE}.worker.gpu_worker.ChoreoGPUWorker",
}
_LOGGER = "vllm.choreo"  # vLLM prints the lines of loggers that are named after it
_installed = False


def install() -> None:
    """Install choreography into this process. Safe to call again.

    Raises:
        UnsupportedVersionError: the installed vLLM is another version.
    """
    global _installed
    if _installed:
        return
    check_version()
    from vllm.platforms import current_platform

    from vllm_choreo.engine import fleet_client, utility

    end_with_parent()
    _hook_command_line(type(current_platform))
    cpu_kernels.hook(type(current_platform))
    if current_platform.is_cpu() or current_platform.is_cuda():
        _hook_configuration(type(current_platform))
        if current_platform.is_cuda():
            attention_choice.hook(type(current_platform))
        utility.install()
        fleet_client.install(command_line.is_active)
    else:
        logger.warning(
            "vllm-choreo serves engines on CPUs and NVIDIA GPUs: on %s choreographed calls are not "
            "available, and vLLM runs as without the plugin.",
            current_platform.device_name,
        )
    _installed = True


def _hook_command_line(platform: type[Platform]) -> None:
    """Give every parser of vLLM's command line the option `--plugin`."""
    pre_register_and_update = platform.pre_register_and_update

    def with_option(cls: type[Platform], parser: FlexibleArgumentParser | None = None) -> None:
        pre_register_and_update(parser)
        if parser is not None:
            command_line.add_option(parser)

    platform.pre_register_and_update = classmethod(with_option)


def _hook_configuration(platform: type[Platform]) -> None:
    """Let every engine configuration pass through ours, around that of vLLM's own platform."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    check_and_update = platform.check_and_update_config
    log = init_logger(_LOGGER)

    def check_and_update_config(cls: type[Platform], vllm_config: VllmConfig) -> None:
        if not command_line.is_active():
            log.info_once("vllm-choreo is installed and not active: --plugin choreo turns it on.")
            return check_and_update(vllm_config)
        configure_before(vllm_config)
        has_latents_on_cpu = _has_mla(vllm_config) and current_platform.is_cpu()
        with mla.keeping_chunks(vllm_config) if has_latents_on_cpu else nullcontext():
            check_and_update(vllm_config)
        configure_after(vllm_config)
        batch_runner.hook(command_line.PLUGIN)

    platform.check_and_update_config = classmethod(check_and_update_config)
    update_block_size = platform.update_block_size_for_backend

    def update_block_size_for_backend(cls: type[Platform], vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        block_size = cache.block_size
        update_block_size(vllm_config)
        if keeps_states(vllm_config):
            # vLLM has made a block as large as a state; ours lie elsewhere.
            cache.block_size, cache.mamba_page_size_padded = block_size, None

    platform.update_block_size_for_backend = classmethod(update_block_size_for_backend)


def keeps_states(vllm_config: VllmConfig) -> bool:
    """Return whether a choreographed engine keeps states of layers, outside the KV cache."""
    scheduler = str(vllm_config.scheduler_config.scheduler_cls)
    return scheduler.startswith(_ENGINE) and vllm_config.model_config.is_hybrid


def _applies(vllm_config: VllmConfig) -> bool:
    """Return whether the engine generates text, the one thing that can be choreographed."""
    model = vllm_config.model_config
    return model is not None and model.runner_type == "generate" and not model.is_encoder_decoder


def _has_mla(vllm_config: VllmConfig) -> bool:
    return _applies(vllm_config) and vllm_config.model_config.use_mla


def configure_before(vllm_config: VllmConfig) -> None:
    """Choose block size or attention backend where the user chose none."""
    from vllm.platforms import current_platform

    if not _applies(vllm_config):
        return
    if current_platform.is_cuda():
        attention_choice.choose_kv_dtype(vllm_config)
    else:
        adopt_declared(vllm_config)
    if _has_mla(vllm_config):
        if current_platform.is_cpu():
            mla.choose_backend(vllm_config)
    elif current_platform.is_cuda():
        attention_choice.check_chosen(vllm_config)
    elif not vllm_config.cache_config.user_specified_block_size:
        vllm_config.cache_config.block_size = CPU_BLOCK_SIZE
        vllm_config.cache_config.user_specified_block_size = True


def configure_after(vllm_config: VllmConfig) -> None:
    """Name our scheduler and worker; refuse what they cannot serve."""
    if not _applies(vllm_config):
        return
    config = ChoreoConfig.from_vllm(vllm_config)  # a wrong setting fails here, not in a worker
    _refuse_unsupported(vllm_config, config)
    _refuse_quantized(vllm_config, config)
    if config.window_groups:
        _refuse_beside_window_groups(vllm_config, config)

    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    name = "ChoreoAsyncScheduler" if scheduler.async_scheduling else "ChoreoScheduler"
    scheduler.scheduler_cls = f"{_ENGINE}.scheduler.scheduler.{name}"
    parallel.worker_cls = _WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    if keeps_states(vllm_config):
        cache, max_model_len = vllm_config.cache_config, vllm_config.model_config.max_model_len
        cache.mamba_cache_mode, cache.mamba_block_size = "none", max_model_len
    graphs.warn_of_eager_steps(vllm_config)


def _check_front_end() -> None:
    """Check that requests come through vLLM's Python front end.

    Raises:
        UnsupportedOptionError: they would not; nothing would tell tenants apart there.
    """
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise UnsupportedOptionError(
            "vLLM's front end in Rust has none of our routes, and lets every client name the "
            "messages of all others: unset VLLM_USE_RUST_FRONTEND, or leave the plugin out",
            parameter="VLLM_USE_RUST_FRONTEND",
            value=True,
        )


def _refuse_unsupported(vllm_config: VllmConfig, config: ChoreoConfig) -> None:
    """Refuse engine options that choreography does not work with.

    Raises:
        UnsupportedOptionError: one of them is set.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    check_speculation(vllm_config)
    _check_front_end()
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    refused = {
        "is_attention_free": model.is_attention_free,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "enable_dbo": parallel.enable_dbo,
        "worker_cls": parallel.worker_cls not in (*_WORKERS, *_WORKERS.values()),
        "scheduler_cls": scheduler_cls is not None and not str(scheduler_cls).startswith(_ENGINE),
    }
    if model.is_hybrid:
        refused["additional_config.choreo.hidden_memory_gib"] = bool(config.hidden_bytes)
        # It would load keys and values of a prefix, and no states.
        refused["kv_transfer_config"] = vllm_config.kv_transfer_config is not None
    _check_composed_states(vllm_config, config)
    graphs.check_full_graphs(vllm_config, config)
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedOptionError(
                "this engine option does not work with choreography yet; leave it out, or run "
                'vLLM without the plugin (VLLM_PLUGINS="")',
                parameter=name,
                value=model.model if name.startswith(("uses", "use_", "is_")) else "set",
            )
    if model.use_mla:
        from vllm.platforms import current_platform

        mla.refuse_unsupported(vllm_config, current_platform.is_cpu())
    if parallel.data_parallel_size > 1:
        _refuse_engines(vllm_config)


def _check_composed_states(vllm_config: VllmConfig, config: ChoreoConfig) -> None:
    """Check that states can be composed where that is asked for.

    Raises:
        UnsupportedOptionError: they cannot; says why.
    """
    from vllm.platforms import current_platform

    if not config.composed_states:
        return
    if not vllm_config.model_config.is_hybrid:
        reason = "this model keeps no states, and reads messages in any order without it"
    elif not current_platform.is_cpu():
        reason = "states are composed on CPUs alone so far; chains are read without it"
    else:
        return
    raise UnsupportedOptionError(
        f"{reason}: leave it out",
        parameter="additional_config.choreo.composed_states",
        value=True,
    )


def _refuse_quantized(vllm_config: VllmConfig, config: ChoreoConfig) -> None:
    """Refuse KV caches that choreography does not read, and what does not go with 8 bits.

    Raises:
        UnsupportedOptionError: says what does.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    of_model = attention_choice.name_of_model_dtype(vllm_config)
    # vLLM's attention on CPUs takes no such name.
    if cache.cache_dtype == "auto" or (
        cache.cache_dtype == of_model and not current_platform.is_cpu()
    ):
        return
    found = "kv_cache_dtype", cache.cache_dtype
    if quantized_name(cache.cache_dtype) is None:
        reason = "choreography reads 'auto', 'fp8', 'fp8_e4m3' and 'fp8_e5m2': choose one of them"
    elif vllm_config.model_config.use_mla:
        reason = "the rows of MLA are choreographed in the dtype of the model alone: use 'auto'"
    elif not current_platform.is_cpu():
        # Of both backends that ours take the place of (`supports_quant_query_input`).
        reason = (
            "on GPUs vLLM rounds queries to 8 bits as well, before choreography turns them for "
            "each parent: use 'auto', or the dtype of the model where its checkpoint declares this"
        )
    elif vllm_config.model_config.is_hybrid:
        reason = "models with states are choreographed in their own dtype alone: use 'auto'"
    elif cache.kv_cache_dtype_skip_layers:
        found = "kv_cache_dtype_skip_layers", ",".join(cache.kv_cache_dtype_skip_layers)
        reason = "a message lies in blocks of one dtype in all layers: leave it out"
    elif config.reposition == "in_place":
        found = "additional_config.choreo.reposition", config.reposition
        reason = (
            f"with kv_cache_dtype={cache.cache_dtype!r} keys cannot be rotated where they lie, for "
            "they would be rounded again with every move: leave it out, so that queries are rotated"
        )
    else:
        return
    parameter, value = found
    raise UnsupportedOptionError(
        f'{reason}; or run vLLM without the plugin (VLLM_PLUGINS="")',
        parameter=parameter,
        value=value,
    )


def _refuse_beside_window_groups(vllm_config: VllmConfig, config: ChoreoConfig) -> None:
    """Refuse what does not go with KV cache groups of layers with windows.

    Raises:
        UnsupportedOptionError: it is set; says why, and what to do.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    transfer = vllm_config.kv_transfer_config
    setting = "additional_config.choreo.window_groups"
    reasons = {
        "additional_config.choreo.reposition": (
            config.reposition == "in_place",
            "what closes a gap of a message is encoded at the positions of its recipe, and its "
            "keys, once moved, stand elsewhere",
        ),
        "kv_transfer_config": (
            transfer is not None and not KVConnectorFactory.supports_hma_config(transfer),
            "vLLM gives this connector one group of all layers (it has no SupportsHMA)",
        ),
        "speculative_config.method": (
            has_layers(vllm_config.speculative_config),
            "vLLM wants all layers of a drafter in one group, and divides those of both models",
        ),
        "disable_hybrid_kv_cache_manager": (
            bool(scheduler.disable_hybrid_kv_cache_manager),
            "vLLM makes one group of all layers then",
        ),
        "model": (
            model.is_hybrid or model.use_mla,
            "its states lie beside one group" if model.is_hybrid else "no layer of it has a window",
        ),
    }
    for name, (is_refused, reason) in reasons.items():
        if is_refused:
            raise UnsupportedOptionError(
                "this does not work with KV cache groups of layers with sliding windows "
                f"({setting}): {reason}; leave one of the two out",
                parameter=name,
                value=model.model if name == "model" else "set",
            )


def _refuse_engines(vllm_config: VllmConfig) -> None:
    """Refuse several engines that are no engines of their own, all on this machine.

    Raises:
        UnsupportedOptionError: they share layers, or a client of ours cannot start them.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    events = vllm_config.kv_events_config
    reasons = {
        "model": (
            vllm_config.model_config.is_moe,
            "engines of a model with experts share these, and end together",
        ),
        "data_parallel_backend": (
            parallel.data_parallel_backend != "mp",
            "engines of one server are processes of its machine",
        ),
        "data_parallel_size_local": (
            parallel.data_parallel_size_local != parallel.data_parallel_size,
            "engines of one server are processes of its machine",
        ),
        "data_parallel_external_lb": (
            parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb,
            "calls go where their messages are, which no balancer before the server knows",
        ),
        "enable_elastic_ep": (parallel.enable_elastic_ep, "the number of engines is fixed"),
        "kv_transfer_config": (transfer is not None, "connectors know one engine"),
        "kv_events_config": (
            events is not None and events.enable_kv_cache_events,
            "events are those of one engine",
        ),
    }
    for name, (is_refused, reason) in reasons.items():
        if is_refused:
            raise UnsupportedOptionError(
                f"{reason}: leave it out, or start a server for each engine (without "
                "--data-parallel-size) and give each session to one of them",
                parameter=name,
                value=getattr(parallel, name, "set") if name != "model" else "with experts",
            )
