# SPDX-License-Identifier: Apache-2.0
"""A range of a model's layers, and what repairing tokens in it costs."""

from __future__ import annotations

from typing import NamedTuple


class LayerRange(NamedTuple):
    """The layers `first … stop-1` of a model that has `num_layers`."""

    first: int
    stop: int
    num_layers: int

    def charged(self, num_tokens: int) -> int:
        """As many tokens through all layers cost as much as `num_tokens` through these."""
        return -(-num_tokens * (self.stop - self.first) // self.num_layers)
