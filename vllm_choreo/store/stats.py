# SPDX-License-Identifier: Apache-2.0
"""What a `MessageStore` says of itself, as plain data."""

from __future__ import annotations

from typing import Any

from vllm_choreo.store.store import Message, MessageStore


def stats(store: MessageStore, session: str | None = None) -> dict[str, Any]:
    """Messages, blocks and sharing, for `c.stats()` and `vllm-choreo inspect`.

    Args:
        session: whose messages; None: those of all sessions.
    """
    everything = [*store.messages.values(), *store.copies.values()]
    chosen = [m for m in everything if session in (None, m.session)]
    now = store.clock()
    return {
        **_counts(chosen, now),
        "num_copies": sum(m.copied is not None for m in chosen),
        "num_blocks": len({b.block_id for m in chosen for b in m.blocks}),
        "num_blocks_all_sessions": len({b.block_id for m in store.holding() for b in m.blocks}),
        "num_evictions": store.totals["evicted_messages"],
        "block_size": store.block_size,
        "messages": [_describe(store, m) for m in chosen],
    }


def totals(store: MessageStore) -> dict[str, Any]:
    """The numbers of all sessions together, and what happened since the engine started."""
    blocks = {block.block_id for message in store.holding() for block in message.blocks}
    everything = [*store.messages.values(), *store.copies.values()]
    return {
        **_counts(everything, store.clock()),
        "num_sessions": len({m.session for m in everything}),
        "num_blocks": len(blocks),
        **{f"{name}_total": count for name, count in store.totals.items()},
    }


def _counts(messages: list[Message], now: float) -> dict[str, int]:
    return {
        "num_messages": len(messages),
        "num_tokens": sum(m.num_tokens for m in messages),
        "num_resident": sum(m.is_resident for m in messages),
        "num_resident_tokens": sum(m.num_encoded for m in messages),
        "num_pinned": sum(m.pinned_until > now for m in messages),
    }


def _describe(store: MessageStore, message: Message) -> dict[str, Any]:
    size = store.block_size
    return {
        "id": message.id,
        "is_copy": message.copied is not None,
        "num_tokens": message.num_tokens,
        "num_encoded": message.num_encoded,
        "stored_position": message.stored_position,
        "is_pinned": message.pinned_until > store.clock(),
        "parents": [parent.id for parent in message.parents],
        "num_readers": message.num_readers,
        "num_waiting": message.num_waiting,
        "failure": message.failure,
        "blocks": [
            {
                "block_id": block.block_id,
                "ref_cnt": block.ref_cnt,
                "num_valid_slots": min(size, message.num_encoded - i * size),
                "position": message.stored_position + i * size,
            }
            for i, block in enumerate(message.blocks)
        ],
    }
