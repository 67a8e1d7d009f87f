# SPDX-License-Identifier: Apache-2.0
"""Counts of a `MessageStore`, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.store import MessageStore


def stats(store: MessageStore, session: str | None = None) -> dict[str, Any]:
    """Messages, blocks and sharing, for `c.stats()` and `vllm-choreo inspect`.

    Args:
        session: the session that has the messages; None: all sessions.
    """
    chosen = _encodings(store, session)
    held = store.residency.holding()
    return {
        **_counts(chosen, store.clock()),
        "num_copies": sum(e.is_copy for e in chosen),
        "num_blocks": _num_blocks(chosen),
        "num_blocks_all_sessions": _num_blocks(held),
        "num_evictions": store.totals["evicted_messages"],
        "num_window_blocks": _num_window_blocks(store, chosen),
        "windows": list(store.groups.windows),
        "block_size": store.block_size,
        "messages": [_describe(store, e) for e in chosen],
    }


def counts(store: MessageStore, session: str) -> dict[str, int]:
    """Counts of a session alone, which are quick to make of many messages."""
    return _counts(_encodings(store, session), store.clock())


def totals(store: MessageStore) -> dict[str, Any]:
    """Counts of all sessions together, and of events since the engine started."""
    everything = _encodings(store, None)
    return {
        **_counts(everything, store.clock()),
        "num_sessions": len({e.message.session for e in everything}),
        "num_blocks": _num_blocks(store.residency.holding()),
        "num_window_blocks": _num_window_blocks(store, store.residency.holding()),
        **{f"{name}_total": count for name, count in store.totals.items()},
    }


def _num_blocks(encodings: Iterable[Encoding]) -> int:
    return len({block.block_id for e in encodings for block in e.held_blocks})


def _num_window_blocks(store: MessageStore, encodings: Iterable[Encoding]) -> int:
    """Blocks that groups with a sliding window hold."""
    has_window = [window is not None for window in store.groups.windows]
    held = (of_group for e in encodings for of_group in compress(e.blocks, has_window))
    return len({block.block_id for of_group in held for block in of_group if not block.is_null})


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


def _describe(store: MessageStore, encoding: Encoding) -> dict[str, Any]:
    size = store.block_size
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
        "num_blocks_by_group": [
            sum(not block.is_null for block in of_group) for of_group in encoding.blocks
        ],
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
