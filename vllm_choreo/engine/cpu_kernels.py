# SPDX-License-Identifier: Apache-2.0
"""vLLM's stand-ins for Triton kernels on CPU, where one of them is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.platforms import Platform


def hook(platform: type[Platform]) -> None:
    """Let vLLM replace its Triton kernels once in a process, not with every engine.

    To do it again changes nothing, but looks through all modules, and stumbles over numba's: after
    an engine that speculates by n-grams no other would start.
    """
    register = platform.register_triton_kernel_overrides

    @cache
    def register_once() -> None:
        if platform.device_type == "cpu":
            from vllm.utils import cpu_triton_utils

            expand = cpu_triton_utils._expand_kernel_impl
            cpu_triton_utils._expand_kernel_impl = writing_all_types(expand)
        register()

    platform.register_triton_kernel_overrides = staticmethod(register_once)


def writing_all_types(expand: Callable[..., None]) -> Callable[..., None]:
    """Wrap the kernel that gives each token of a batch its request's value.

    vLLM's writes into an integer copy of any output that is not one of 64 bits. So where a request
    speculates beside one that samples, temperatures were what lay in memory before.

    Args:
        expand: vLLM's; its first two arguments are the output, `[num_tokens]`, and the requests'
            values, `[num_requests]`, and it writes the first.
    """

    @wraps(expand)
    def expand_any(
        output: torch.Tensor,
        values: torch.Tensor,
        ends: torch.Tensor,
        replace_from: float,
        replace_to: float,
        *args: object,
        **kwargs: object,
    ) -> None:
        if output.dtype == torch.int64:
            expand(output, values, ends, replace_from, replace_to, *args, **kwargs)
        else:
            _expand(output, values, ends, replace_from, replace_to)

    return expand_any


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
) -> None:
    """Write `values`, but `replace_to` for `replace_from`, to the tokens before each of `ends`."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts, output_size=len(output)))
