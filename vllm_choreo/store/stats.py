# SPDX-License-Identifier: Apache-2.0
"""Counts of a `MessageStore`, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import compress
from typing import Any, NamedTuple

from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.store import MessageStore


class MemorySizes(NamedTuple):
    """Bytes that things take in the memory of one worker, in all its layers.

    Attributes:
        block: size of a block of the KV cache, whose group it may be.
        state: size of a state, with what is kept beside it; 0: the model has none.
    """

    block: int
    state: int


def stats(store: MessageStore, sizes: MemorySizes, session: str | None = None) -> dict[str, Any]:
    """Messages, blocks and sharing, for `c.stats()` and `vllm-choreo inspect`.

    Args:
        session: the session that has the messages; None: all sessions.
    """
    chosen = _encodings(store, session)
    held = store.residency.holding()
    return {
        **_counts(chosen, store.clock()),
        "num_copies": sum(e.is_copy for e in chosen),
        **_memory(store, chosen),
        "num_blocks_all_sessions": sum(_num_blocks_by_group(store, held)),
        "num_evictions": store.totals["evicted_messages"],
        "windows": list(store.groups.windows),
        "block_size": store.block_size,
        "messages": [_describe(store, e, sizes) for e in chosen],
    }


def counts(store: MessageStore, session: str) -> dict[str, int]:
    """Counts of a session alone, which are quick to make of many messages."""
    return _counts(_encodings(store, session), store.clock())


def totals(store: MessageStore) -> dict[str, Any]:
    """Counts of all sessions together, and of events since the engine started."""
    everything = _encodings(store, None)
    states = store.states.holding() if store.states else []
    return {
        **_counts(everything, store.clock()),
        "num_sessions": len({e.message.session for e in everything}),
        **_memory(store, {*store.residency.holding(), *states}),
        **{f"{name}_total": count for name, count in store.totals.items()},
    }


def _memory(store: MessageStore, encodings: Collection[Encoding]) -> dict[str, Any]:
    """Blocks and states that encodings hold, each counted once."""
    by_group = _num_blocks_by_group(store, encodings)
    has_window = (window is not None for window in store.groups.windows)
    return {
        "num_blocks": sum(by_group),
        "num_blocks_by_group": by_group,
        "num_window_blocks": sum(compress(by_group, has_window)),
        "num_message_states": len({e.state.block_id for e in encodings if e.state is not None}),
    }


def _num_blocks_by_group(store: MessageStore, encodings: Iterable[Encoding]) -> list[int]:
    found: list[set[int]] = [set() for _ in store.groups.windows]
    for encoding in encodings:
        for ids, of_group in zip(found, encoding.blocks, strict=False):  # none: it holds none
            ids.update(block.block_id for block in of_group if not block.is_null)
    return [len(ids) for ids in found]


def _encodings(store: MessageStore, session: str | None) -> list[Encoding]:
    """Own encodings of the messages first, then the copies."""
    messages = store.messages(session)
    return [*(m.own for m in messages), *(copy for m in messages for copy in m.copies.values())]


def _counts(encodings: list[Encoding], now: float) -> dict[str, int]:
    return {
        "num_messages": len(encodings),
        "num_tokens": sum(e.num_tokens for e in encodings),
        "num_resident": sum(e.is_resident for e in encodings),
        "num_resident_tokens": sum(e.num_encoded for e in encodings),
        "num_pinned": sum(e.is_pinned(now) for e in encodings),
    }


def _describe(store: MessageStore, encoding: Encoding, sizes: MemorySizes) -> dict[str, Any]:
    size = store.block_size
    by_group = [sum(not block.is_null for block in of_group) for of_group in encoding.blocks]
    return {
        "id": encoding.message.id,
        "is_copy": encoding.is_copy,
        "num_tokens": encoding.num_tokens,
        "num_encoded": encoding.num_encoded,
        "stored_position": encoding.stored_position,
        "is_pinned": encoding.is_pinned(store.clock()),
        "has_state": encoding.state is not None,
        "is_untrusted": encoding.is_untrusted,
        "parents": [parent.message.id for parent in encoding.parents],
        "num_readers": encoding.num_readers,
        "num_waiting": encoding.num_waiting,
        "num_blocks_by_group": by_group,
        "bytes_by_group": [num_blocks * sizes.block for num_blocks in by_group],
        "state_bytes": sizes.state if encoding.state is not None else 0,
        "host_bytes": _host_bytes(store, encoding, sizes),
        "failure": encoding.message.failure,
        "blocks": [
            {
                "group": group,
                "block_id": block.block_id,
                "ref_cnt": block.ref_cnt,
                "num_valid_slots": min(size, encoding.num_encoded - i * size),
                "position": encoding.stored_position + i * size,
            }
            for group, of_group in enumerate(encoding.blocks)
            for i, block in enumerate(of_group)
            if not block.is_null
        ],
    }


def _host_bytes(store: MessageStore, encoding: Encoding, sizes: MemorySizes) -> int:
    """Bytes of an encoding in host memory: of its blocks, and of its state."""
    blocks, states = store.tier, store.states.tier if store.states else None
    num_blocks = blocks.num_blocks_of(encoding) if blocks else 0
    return num_blocks * sizes.block + (sizes.state if states and encoding in states else 0)
