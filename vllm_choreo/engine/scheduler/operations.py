# SPDX-License-Identifier: Apache-2.0
"""What the client asks of the scheduler between steps, through the engine core (`utility`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_choreo.errors import ChoreoError
from vllm_choreo.store import stats as store_stats
from vllm_choreo.store.store import Message

if TYPE_CHECKING:
    from vllm_choreo.engine.scheduler.scheduler import ChoreoScheduler


class Operations:
    """Public methods are operations: plain data in, plain data out."""

    def __init__(self, scheduler: ChoreoScheduler) -> None:
        self.scheduler = scheduler
        self.store = scheduler.store
        self.book = scheduler.book

    def free(self, session: str, message_ids: Iterable[str]) -> int:
        """Give messages up; returns how many there were."""
        messages = [self.store.messages.get((session, m)) for m in message_ids]
        found = [message for message in messages if message is not None]
        self._withdraw_encodings({*found, *self.store.copies_of(found)})
        for message in found:
            self.store.free(message)
        return len(found)

    def close(self, session: str) -> int:
        """Give up all messages of a session; returns how many there were."""
        return self.free(session, [m.id for m in self.store.of_session(session)])

    def evict(self, session: str, message_ids: Iterable[str]) -> int:
        """Drop the blocks of messages that no running call reads; the recipes stay."""
        messages = {self.store.get(session, message_id) for message_id in message_ids}
        messages.update(copy for copy in self.store.copies.values() if copy.copied in messages)
        # A seal that waits for its step holds its parents; without it, its message lacks a token
        # until it is read.
        sealed = [
            call.message for call in self.scheduler.unsealed() if messages & set(call.parents)
        ]
        self._withdraw_encodings(messages.union(sealed))
        idle = [m for m in messages if m.is_known and not m.num_readers and m.encoder is None]
        for message in idle:
            self.store.evict(message)
        return len(idle)

    def end(self, session: str, message_id: str, num_tokens: int) -> dict[str, Any] | None:
        """Complete an open message with its first `num_tokens` tokens; with none, fail it.

        Returns:
            The report of its call, or None if there is no such message that is still open.
        """
        message = self.store.messages.get((session, message_id))
        if message is None:
            return None
        if message.encoder in self.book.calls:  # the client's abort is still under way
            self.scheduler.finish_requests(message.encoder, RequestStatus.FINISHED_ABORTED)
        if num_tokens:
            return self.store.end(message, num_tokens)
        message.failure = "it was ended by the client"
        self.store.settle(message)
        return None

    def pin(self, session: str, message_ids: Iterable[str], ttl: float) -> dict[str, Any]:
        """Evict messages last, for `ttl` seconds; an error report if that is too much."""
        try:
            messages = {self.store.get(session, message_id) for message_id in message_ids}
            self.store.pin(
                messages, ttl, self.scheduler.num_blocks(self.scheduler.choreo_config.pinned_share)
            )
        except ChoreoError as error:
            return {"choreo_error": error.to_report()}
        return {"num_pinned": len(messages)}

    def unpin(self, session: str, message_ids: Iterable[str]) -> None:
        """Take pins back."""
        for message_id in message_ids:
            self.store.get(session, message_id).pinned_until = 0.0

    def totals(self) -> dict[str, Any]:
        """The numbers of all sessions together, for metrics."""
        return {**store_stats.totals(self.store), **self._pool_stats()}

    def stats(self, session: str | None = None) -> dict[str, Any]:
        """Messages, blocks and sharing; of all sessions if `session` is None."""
        return {**store_stats.stats(self.store, session), **self._pool_stats()}

    def _pool_stats(self) -> dict[str, int]:
        pool, calls = self.scheduler.kv_cache_manager.block_pool, self.book.calls.values()
        return {
            "num_free_blocks": pool.get_num_free_blocks(),
            "num_pool_blocks": pool.num_gpu_blocks,
            "num_host_blocks": self.scheduler.tier.num_blocks if self.scheduler.tier else 0,
            "num_host_blocks_used": self.scheduler.tier.num_used if self.scheduler.tier else 0,
            "num_calls": len(self.book.calls),
            "num_calls_waiting": sum(not c.admitted and not self.book.is_ready(c) for c in calls),
        }

    def _withdraw_encodings(self, messages: set[Message]) -> None:
        """Do not seal or encode again messages that are given up, unless a call waits for them."""
        while idle := [
            call.request.request_id
            for call in self.book.calls.values()
            if call.is_internal and call.message in messages and not call.message.num_waiting
        ]:
            self.scheduler.finish_requests(idle, RequestStatus.FINISHED_ABORTED)
