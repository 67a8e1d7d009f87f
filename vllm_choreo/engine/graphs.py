# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of choreographed steps: a warning where the configuration leaves them none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
