# SPDX-License-Identifier: Apache-2.0
"""Keys and values that a cache holds in 8 bits, as vLLM stores them.

The cache is uint8. A byte is a number of torch's `float8_e4m3fn` or `float8_e5m2`, and a key or a
value is that number times the layer's scale. Operations read such caches and never write them: what
is stored was rounded once, and a key that was rotated would be rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class QuantizedKV:
    """Meaning of the bytes of one layer's cache.

    Attributes:
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        key_scale, value_scale: positive factors of what the bytes stand for.

    Raises:
        ValueError: another dtype, or a scale that is not positive and finite.
    """

    dtype: torch.dtype
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; choose one of {', '.join(map(str, DTYPES))}")
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            if not 0.0 < scale < float("inf"):
                raise ValueError(f"{name} is {scale}; it must be positive and finite")

    @property
    def name(self) -> str:
        """Name of the dtype, such as "float8_e4m3fn"."""
        return str(self.dtype).removeprefix("torch.")

    def keys(self, stored: torch.Tensor) -> torch.Tensor:
        """Keys in float32 of uint8 bytes, of any shape."""
        return stored.view(self.dtype).float() * self.key_scale

    def values(self, stored: torch.Tensor) -> torch.Tensor:
        """Values in float32 of uint8 bytes, of any shape."""
        return stored.view(self.dtype).float() * self.value_scale
