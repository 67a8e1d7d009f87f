# SPDX-License-Identifier: Apache-2.0
"""A range of a model's layers, and what repairing tokens in it costs."""

from __future__ import annotations

from typing import NamedTuple


class LayerRange(NamedTuple):
    """The layers `first … stop-1` of a model that has `num_layers`.

    Attributes:
        share: None: tokens are anew in these layers. Else they are run through these alone to find
            the blocks whose keys in the last of them change most, up to this share of the tokens:
            those are anew in all layers, and nothing else is.
    """

    first: int
    stop: int
    num_layers: int
    share: float | None = None

    def repaired(self, num_tokens: int) -> int:
        """How many of the tokens are anew, at most."""
        return num_tokens if self.share is None else int(self.share * num_tokens)

    def charged(self, num_tokens: int) -> int:
        """As many tokens through all layers cost as much."""
        through = -(-num_tokens * (self.stop - self.first) // self.num_layers)
        return through if self.share is None else through + self.repaired(num_tokens)
