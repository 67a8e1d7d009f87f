# SPDX-License-Identifier: Apache-2.0
"""Options of engines that are held to laws, and timed."""

from __future__ import annotations

from typing import Any


def options(custom_ops: str, **given: Any) -> dict[str, Any]:
    """Options of `LLM`; on a CPU those of its engine.

    Args:
        custom_ops: "all", or "none": PyTorch in place of vLLM's own operations of layers.
    """
    import torch

    given = {"seed": 0, "enable_prefix_caching": True, **given}
    if not torch.cuda.is_available():
        return {**given, "enforce_eager": True}
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= given["max_num_seqs"]]
    return {
        **given,
        "compilation_config": {
            "mode": 0,
            "custom_ops": [custom_ops],
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sizes,
        },
        "kernel_config": {"enable_flashinfer_autotune": False},
    }
