# SPDX-License-Identifier: Apache-2.0
"""Room of the step that is planned: blocks of the KV cache, and states of models that have some."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass
class Room:
    """Blocks and states of which calls take one after the other; by default without bounds.

    Attributes:
        num_blocks: blocks that are left; negative if somebody took more than there were.
        num_states: states that are left, likewise.
    """

    num_blocks: int = sys.maxsize
    num_states: int = sys.maxsize

    def has(self, num_blocks: int, num_states: int) -> bool:
        """Return whether so many are left."""
        return num_blocks <= self.num_blocks and num_states <= self.num_states

    def take(self, num_blocks: int, num_states: int) -> None:
        """Take so many, whether they are left or not."""
        self.num_blocks -= num_blocks
        self.num_states -= num_states
