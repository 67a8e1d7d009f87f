# SPDX-License-Identifier: Apache-2.0
"""How choreography enters vLLM: hooks into its command line and into its configuration.

Every vLLM name that is not public is reached from this package `engine`; this module checks that
the installed vLLM is the version for which they were read.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine import command_line
from vllm_choreo.errors import UnsupportedOptionError, UnsupportedVersionError

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = "0.32.0"
# The smallest block that vLLM's CPU kernel takes at full speed: less padding per message.
CPU_BLOCK_SIZE = 32
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"

_ENGINE = "vllm_choreo.engine"
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

    from vllm_choreo.engine import utility

    _hook_command_line(type(current_platform))
    if current_platform.is_cpu():
        _hook_configuration(type(current_platform))
        utility.install()
    else:
        logger.warning(
            "vllm-choreo serves CPU engines only so far: on %s choreographed calls are not "
            "available, and vLLM runs as without the plugin.",
            current_platform.device_name,
        )
    _installed = True


def check_version() -> None:
    """
    Raises:
        UnsupportedVersionError: the installed vLLM is another version.
    """
    import vllm

    # A build may add a local part: 0.32.0+cpu.
    if vllm.__version__.split("+")[0] != SUPPORTED_VLLM:
        raise UnsupportedVersionError(
            f"vllm-choreo works with vLLM {SUPPORTED_VLLM}: install that version, or leave "
            '"choreo" out of VLLM_PLUGINS (VLLM_PLUGINS="" loads no plugin)',
            parameter="vllm.__version__",
            value=vllm.__version__,
        )


def _hook_command_line(platform: Any) -> None:
    """Give every parser of vLLM's command line the option `--plugin`."""
    pre_register_and_update = platform.pre_register_and_update

    def with_option(cls: Any, parser: Any = None) -> None:
        pre_register_and_update(parser)
        if parser is not None:
            command_line.add_option(parser)

    platform.pre_register_and_update = classmethod(with_option)


def _hook_configuration(platform: Any) -> None:
    """Let every engine configuration pass through ours, around that of vLLM's own platform."""
    from vllm.logger import init_logger

    check_and_update = platform.check_and_update_config
    log = init_logger(_LOGGER)

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if not command_line.is_active():
            log.info_once("vllm-choreo is installed and not active: --plugin choreo turns it on.")
            return check_and_update(vllm_config)
        configure_before(vllm_config)
        check_and_update(vllm_config)
        configure_after(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _applies(vllm_config: Any) -> bool:
    """Whether the engine generates text, the one thing that can be choreographed."""
    model = vllm_config.model_config
    return model is not None and model.runner_type == "generate" and not model.is_encoder_decoder


def configure_before(vllm_config: Any) -> None:
    """Choose a small block size when the user chose none."""
    cache = vllm_config.cache_config
    if not _applies(vllm_config) or cache.user_specified_block_size:
        return
    if not vllm_config.model_config.use_mla:
        cache.block_size = CPU_BLOCK_SIZE
        cache.user_specified_block_size = True


def configure_after(vllm_config: Any) -> None:
    """Name our scheduler and worker; refuse what they cannot serve."""
    if not _applies(vllm_config):
        return
    _refuse_unsupported(vllm_config)
    ChoreoConfig.from_vllm(vllm_config)  # a wrong setting fails here, not in a worker
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    name = "ChoreoAsyncScheduler" if scheduler.async_scheduling else "ChoreoScheduler"
    scheduler.scheduler_cls = f"{_ENGINE}.scheduler.{name}"
    parallel.worker_cls = f"{_ENGINE}.cpu_worker.ChoreoCPUWorker"


def _refuse_unsupported(vllm_config: Any) -> None:
    """
    Raises:
        UnsupportedOptionError: an engine option that choreography does not work with.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    refused = {
        "uses_mrope": model.uses_mrope,
        "use_mla": model.use_mla,
        "is_hybrid": model.is_hybrid or model.is_attention_free,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "speculative_config.method": speculative is not None and speculative.method != "ngram",
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype != "auto",
        "worker_cls": not str(parallel.worker_cls).startswith((CPU_WORKER, _ENGINE)),
        "scheduler_cls": scheduler_cls is not None and not str(scheduler_cls).startswith(_ENGINE),
        "VLLM_USE_V2_MODEL_RUNNER": vllm_config.use_v2_model_runner,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedOptionError(
                "this engine option does not work with choreography yet; leave it out, or run "
                'vLLM without the plugin (VLLM_PLUGINS="")',
                parameter=name,
                value=model.model if name.startswith(("uses", "use_", "is_")) else "set",
            )
