# SPDX-License-Identifier: Apache-2.0
"""Whose blocks make room: pure choices among messages. Imports neither torch nor vllm.

idle, not pinned   <   idle, pinned   <   read by a call that waits   <   read by a running call
least recently used first                 only if nothing runs            never
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_choreo.store.store import Message


def choose_victim(
    holding: Iterable[Message],
    protected: Sequence[Collection[Message]],
    waiting_too: bool,
    now: float,
) -> Message | None:
    """The message whose blocks are given up next, or None if none may be.

    Args:
        holding: messages that hold blocks, least recently used first.
        protected: never the messages of the first set; those of the later sets only with
            `waiting_too`, the last set first.
        waiting_too: where no message is idle, take one for which a call waits. It will be encoded
            again; without this, calls that wait could block one another for ever.
        now: pins that end later hold.
    """
    candidates = [message for message in holding if not message.num_readers]
    spared = set().union(*protected)
    idle = [message for message in candidates if not message.in_use and message not in spared]
    # Pins are soft: they decide the order, and no message is out of reach for ever.
    victim = next((m for m in idle if m.pinned_until <= now), idle[0] if idle else None)
    if victim is None and waiting_too:
        victim = _least_protected(candidates, protected)
    return victim


def over_share(holding: Iterable[Message], max_blocks: int, now: float) -> Iterator[Message]:
    """Idle messages to evict so that no tenant's messages hold more than `max_blocks` blocks.

    Blocks that messages share count once for each of them. Pinned messages stay.
    """
    messages = list(holding)
    num_blocks = Counter[str]()
    for message in messages:
        num_blocks[message.tenant] += len(message.blocks)
    for message in messages:
        is_idle = not message.in_use and message.pinned_until <= now
        if num_blocks[message.tenant] > max_blocks and is_idle:
            num_blocks[message.tenant] -= len(message.blocks)
            yield message


def _least_protected(
    candidates: Sequence[Message], protected: Sequence[Collection[Message]]
) -> Message | None:
    for num_sets in range(len(protected), 0, -1):
        spared = set().union(*protected[:num_sets])
        for message in reversed(candidates):
            if message not in spared:
                return message
    return None if protected or not candidates else candidates[-1]
