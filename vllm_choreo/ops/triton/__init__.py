# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, for GPUs; on CPU they run in Triton's interpreter (TRITON_INTERPRET=1)."""

from vllm_choreo.ops.triton.attention import (
    fill_room,
    launch_again,
    make_room,
    make_tiles,
    span_attention,
)
from vllm_choreo.ops.triton.reposition import reposition_keys

__all__ = [
    "fill_room",
    "launch_again",
    "make_room",
    "make_tiles",
    "reposition_keys",
    "span_attention",
]
