# SPDX-License-Identifier: Apache-2.0
"""Changes of blocks and states that a step begins with: planned by the store, made by workers.

Integers alone, for they travel between processes. Imports neither torch nor vllm.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockMove(NamedTuple):
    """Rotate the keys of block `src` by `delta` positions into block `dst`, or in place.

    Both are blocks of one KV cache group.
    """

    src: int
    dst: int
    delta: int
    group: int = 0


class StateStart(NamedTuple):
    """Start of a state with what messages left, by the numbers of states.

    Attributes:
        target: the state that begins.
        behind: the state that it is at first; None: that of an empty text.
        composed: (state, tokens of its message) of each message that changes it then, in order.
    """

    target: int
    behind: int | None
    composed: tuple[tuple[int, int], ...] = ()
