# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of choreographed steps, as far as the configuration leaves them any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_choreo.config import ChoreoConfig

logger = init_logger("vllm.choreo.graphs")  # vLLM prints the lines of loggers named after it


def warn_of_eager_steps(vllm_config: VllmConfig) -> None:
    """Log a warning if choreographed steps will run without any CUDA graph.

    A full graph replays vLLM's own attention, so such a step takes piecewise ones, which leave
    attention out; where those are not captured, the whole model is launched kernel by kernel.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs() or mode.has_piecewise_cudagraphs():
        return
    logger.warning_once(
        "compilation_config.cudagraph_mode=%s captures no piecewise CUDA graphs: choreographed "
        "steps will run the whole model eagerly, at the speed of enforce_eager=True. Use "
        "cudagraph_mode=FULL_AND_PIECEWISE: ordinary steps keep their full graphs.",
        mode.name,
    )


def check_full_graphs(vllm_config: VllmConfig, config: ChoreoConfig) -> None:
    """Check that choreographed steps can have full CUDA graphs where that is asked for.

    Raises:
        UnsupportedOptionError: they cannot; says why.
    """
    from vllm.platforms import current_platform

    if not config.full_cuda_graphs:
        return
    model = vllm_config.model_config
    reasons = {
        "there are no CUDA graphs on CPUs": current_platform.is_cpu(),
        "enforce_eager allows no CUDA graphs": model.enforce_eager,
        "vLLM's model runner V1 has no second set of graphs": not vllm_config.use_v2_model_runner,
        "models with states have none so far": model.is_hybrid,
        "engines that speculate have none so far": vllm_config.speculative_config is not None,
        "engines with LoRA have none so far": vllm_config.lora_config is not None,
        "engines with data parallelism have none so far": (
            vllm_config.parallel_config.data_parallel_size > 1
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UnsupportedOptionError(
                f"{reason}: leave it out; where there are piecewise graphs, steps take these",
                parameter="additional_config.choreo.full_cuda_graphs",
                value=True,
            )
