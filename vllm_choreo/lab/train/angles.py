# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of rotary embeddings, precise at any position.

`transformers` multiplies position and frequency in float32, which is off by 6e-8 of the angle: at
position 1,500 that moves log-probabilities by up to 6e-4, and at 8,000 by five times as much. A
product by a power of two is exact. So the module's own values at 1, 2, 4, ... are put together to
those of any position, in float64 and whatever the order of its components.
"""

from __future__ import annotations

from typing import Any

import torch


def make_precise(model: torch.nn.Module) -> None:
    """Correct what the rotary modules of a model return from now on; twice does no harm."""
    for module in model.modules():
        if frequency_buffers(module) and not getattr(module, "_choreo_precise", False):
            module.register_forward_hook(_correct, with_kwargs=True)
            module._choreo_precise = True


def frequency_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Radians per position, as a rotary module declares them; one for each kind of layer."""
    return [
        buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]


def _correct(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
) -> object:
    """Return the module's cosines and sines, `[1, num_tokens, dim]` each, computed precisely.

    Output of another form is returned as it is.
    """
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if not isinstance(output, tuple) or len(output) != 2 or positions.dim() != 2:
        return output
    if output[0].is_complex() or len(positions) != 1:
        return output
    num_bits = max(1, int(positions.max()).bit_length())
    powers = torch.tensor([0, *(1 << bit for bit in range(num_bits))], device=positions.device)
    x = kwargs["x"] if "x" in kwargs else args[0]
    rest = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
    cos, sin = module.forward(x.float(), powers[None], *args[2:], **rest)
    scaling = cos[0, :1].double()  # the cosine of 0 is 1 but for it
    cos, sin = (part[0, 1:].double() / scaling for part in (cos, sin))
    turned = _compose(positions[0], cos, sin)
    return tuple((part * scaling)[None].to(output[0].dtype) for part in turned)


def _compose(
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[num_tokens, dim]` of sums of the angles at powers of two.

    Args:
        positions: int64 `[num_tokens]`.
        cos, sin: float64 `[num_bits, dim]`; row `k` of position `2 ** k`.
    """
    all_cos = cos.new_ones(len(positions), cos.shape[1])
    all_sin = torch.zeros_like(all_cos)
    for bit, (c, s) in enumerate(zip(cos, sin, strict=True)):
        is_set = (positions >> bit & 1).bool()[:, None]
        turned = all_cos * c - all_sin * s, all_sin * c + all_cos * s
        all_cos = torch.where(is_set, turned[0], all_cos)
        all_sin = torch.where(is_set, turned[1], all_sin)
    return all_cos, all_sin
