# SPDX-License-Identifier: Apache-2.0
"""Choice of the encodings whose blocks make room: pure functions. Imports neither torch nor vllm.

idle, not pinned   <   idle, pinned   <   read by a call that waits   <   read by a running call
least recently used first                 only if nothing runs            never
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from vllm_choreo.store.encoding import Encoding


def choose_victim(
    holding: Collection[Encoding],
    protected: Iterable[Collection[Encoding]],
    waiting_too: bool,
    now: float,
) -> Encoding | None:
    """Encoding whose blocks are given up next, or None if none may be.

    Args:
        holding: encodings that hold blocks, least recently used first.
        protected: sets of encodings: those of the first are never chosen, those of the later ones
            only with `waiting_too`, the last set first.
        waiting_too: where none is idle, take one for which a call waits. It will be encoded again;
            without this, calls that wait could block one another for ever.
        now: the time, on the clock of the store: pins that end later hold.
    """
    # One walk over the sets: a chain of calls that encode for one another has as many as links.
    first_set: dict[Encoding, int] = {}
    for number, encodings in enumerate(protected):
        for encoding in encodings:
            first_set.setdefault(encoding, number)
    pinned = None
    for encoding in holding:
        if encoding.in_use or encoding in first_set:
            continue
        if not encoding.is_pinned(now):
            return encoding
        pinned = pinned or encoding
    # Pins are soft: they decide the order, and no encoding is out of reach for ever.
    if pinned is None and waiting_too:
        return _least_protected([e for e in holding if not e.num_readers], first_set)
    return pinned


def over_share(holding: Iterable[Encoding], max_blocks: int, now: float) -> Iterator[Encoding]:
    """Idle encodings to evict so that no tenant's hold more than `max_blocks` blocks.

    Blocks that encodings share count once for each of them. Pinned ones stay.
    """
    encodings = list(holding)
    num_blocks = Counter[str]()
    for encoding in encodings:
        num_blocks[encoding.message.tenant] += encoding.num_blocks
    for encoding in encodings:
        tenant = encoding.message.tenant
        if num_blocks[tenant] > max_blocks and not encoding.in_use and not encoding.is_pinned(now):
            num_blocks[tenant] -= encoding.num_blocks
            yield encoding


def _least_protected(
    candidates: Sequence[Encoding], first_set: Mapping[Encoding, int]
) -> Encoding | None:
    """Latest used encoding that is in no set, else in the last set alone; never in the first."""
    victim, rank = None, 0.0
    for encoding in reversed(candidates):
        found = first_set.get(encoding, float("inf"))
        if found > rank:
            victim, rank = encoding, found
    return victim
