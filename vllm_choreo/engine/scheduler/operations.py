# SPDX-License-Identifier: Apache-2.0
"""Operations that the client asks of the scheduler between steps, through the engine core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from vllm_choreo.engine.moves import MessageMoves
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.store import stats as store_stats
from vllm_choreo.store.encoding import Encoding, copies_of

OPERATIONS = ("free", "close", "evict", "end", "pin", "unpin", "stats", "counts", "totals")


class Operations:
    """Operations by name; the methods named in `OPERATIONS` take and return plain data.

    Args:
        snapshots: operations of messages that are saved and loaded, by name.
        max_pinned_blocks: blocks of the KV cache that pinned messages may hold.
        sizes: bytes of a block; those of a state are told by workers, see `lacks_state_bytes`.
        pending_last_tokens: returns the calls that encode a last token and wait for their step.
        finish: the scheduler's `finish_requests`.

    Attributes:
        moves: moves of messages from and to this engine; None: none was asked for so far.
    """

    def __init__(
        self,
        call_table: CallTable,
        pool: BlockPool,
        *,
        snapshots: Mapping[str, Callable[..., Any]],
        max_pinned_blocks: int,
        sizes: store_stats.MemorySizes,
        pending_last_tokens: Callable[[], list[ScheduledCall]],
        finish: Callable[[Iterable[str], RequestStatus], Any],
    ) -> None:
        self._call_table = call_table
        self._store = call_table.store
        self._pool = pool
        self._snapshots = snapshots
        self._max_pinned_blocks = max_pinned_blocks
        self._sizes = sizes
        self._pending_last_tokens = pending_last_tokens
        self._finish = finish
        self.moves: MessageMoves | None = None

    def run(self, operation: str, args: Iterable[Any]) -> Any:
        """Run an operation by its name.

        Raises:
            ChoreoError: it is refused.
        """
        assert operation in OPERATIONS or operation in self._snapshots
        run = self._snapshots.get(operation) or getattr(self, operation)
        return run(*args)

    @property
    def lacks_state_bytes(self) -> bool:
        """True if the model has states, and `set_state_bytes` is still to be called."""
        return self._store.states is not None and not self._sizes.state

    def set_state_bytes(self, num_bytes: int) -> None:
        """Note how many bytes a state takes in one worker, which workers alone know."""
        self._sizes = self._sizes._replace(state=num_bytes)

    def free(self, session: str, message_ids: Iterable[str]) -> int:
        """Free messages; returns how many there were."""
        messages = [self._store.find(session, message_id) for message_id in message_ids]
        found = [message for message in messages if message is not None]
        self._withdraw_encodings({*(message.own for message in found), *copies_of(found)})
        for message in found:
            self._store.free(message)
        return len(found)

    def close(self, session: str) -> int:
        """Free all messages of a session; returns how many there were."""
        return self.free(session, [message.id for message in self._store.messages(session)])

    def evict(self, session: str, message_ids: Iterable[str]) -> int:
        """Drop the blocks of messages that no running call reads; the recipes stay.

        Raises:
            UnknownMessageError: there is no such message.
        """
        messages = {self._store.get(session, m, "messages") for m in message_ids}
        encodings = {encoding for message in messages for encoding in message.encodings}
        # A last token that waits for its step holds the parents; without it, its message lacks one
        # until it is read.
        unfinished = [
            call.encoding for call in self._pending_last_tokens() if encodings & set(call.parents)
        ]
        self._withdraw_encodings(encodings.union(unfinished))
        idle = [e for e in encodings if e.is_known and not e.num_readers and not e.encoders]
        for encoding in idle:
            self._store.evict(encoding)
        return sum(not encoding.is_copy for encoding in idle)

    def end(
        self, session: str, message_id: str, num_tokens: int, request: str | None = None
    ) -> dict[str, Any] | None:
        """Complete an open message with its first `num_tokens` tokens; with none, fail it.

        Args:
            session, message_id: names of the message.
            num_tokens: tokens that the client keeps.
            request: id of the request that makes the message. Another one, which was refused
                because the name is taken, ends nothing of the message that has it.

        Returns:
            The report of its call, or None if there is no such message that is still open.
        """
        message = self._store.find(session, message_id)
        if message is None or (request is not None and message.request != request):
            return None
        if running := message.own.encoders & self._call_table.calls.keys():
            # The client's abort is still under way.
            self._finish(list(running), RequestStatus.FINISHED_ABORTED)
        if num_tokens or message.own.is_known:
            return self._store.end(message, num_tokens)
        self._store.fail(message, "it was ended by the client")
        return None

    def pin(self, session: str, message_ids: Iterable[str], ttl: float) -> dict[str, Any]:
        """Evict messages last, for `ttl` seconds.

        Raises:
            UnknownMessageError: there is no such message.
            LimitError: pinned messages would hold too many blocks.
        """
        messages = {self._store.get(session, m, "messages") for m in message_ids}
        self._store.pin(messages, ttl, self._max_pinned_blocks)
        return {"num_pinned": len(messages)}

    def unpin(self, session: str, message_ids: Iterable[str]) -> None:
        """Take pins back.

        Raises:
            UnknownMessageError: there is no such message.
        """
        for message in [self._store.get(session, m, "messages") for m in message_ids]:
            message.pinned_until = 0.0

    def totals(self) -> dict[str, Any]:
        """Counts of all sessions together, for metrics."""
        return {**store_stats.totals(self._store), **self._pool_stats()}

    def stats(self, session: str | None = None) -> dict[str, Any]:
        """Messages, blocks and sharing; of all sessions if `session` is None."""
        return {**store_stats.stats(self._store, self._sizes, session), **self._pool_stats()}

    def counts(self, session: str) -> dict[str, Any]:
        """Counts of a session, without its messages."""
        return store_stats.counts(self._store, session)

    def drop_idle(self) -> None:
        """Drop all keys and values that no running call reads; see `MessageStore.empty`."""
        self._finish(
            [call.id for call in self._pending_last_tokens()], RequestStatus.FINISHED_ABORTED
        )
        self._store.empty()

    def _pool_stats(self) -> dict[str, int]:
        tier, hidden, states = self._store.tier, self._store.hidden, self._store.states
        pictures = self._store.pictures
        states_tier = states.tier if states else None
        waiting = self._call_table.waiting.values()
        return {
            "num_free_blocks": self._pool.get_num_free_blocks(),
            "num_pool_blocks": self._pool.num_gpu_blocks,
            "block_bytes": self._sizes.block,
            "state_bytes": self._sizes.state,
            "num_host_blocks": tier.num_blocks if tier else 0,
            "num_host_blocks_used": tier.num_used if tier else 0,
            "num_states": states.num_states if states else 0,
            "num_states_used": states.num_states - states.num_free if states else 0,
            "num_host_states": states_tier.num_blocks if states_tier else 0,
            "num_host_states_used": states_tier.num_used if states_tier else 0,
            "num_hidden_bytes": hidden.num_bytes if hidden else 0,
            "max_hidden_bytes": hidden.max_bytes if hidden else 0,
            "num_picture_bytes": pictures.num_bytes if pictures else 0,
            "max_picture_bytes": pictures.max_bytes if pictures else 0,
            "num_calls": len(self._call_table.calls),
            "num_calls_waiting": len(self._call_table.parking)
            + sum(not self._call_table.is_ready(call) for call in waiting),
        }

    def _withdraw_encodings(self, encodings: set[Encoding]) -> None:
        """End what encodes these encodings, or their last tokens, unless a call waits for them."""
        ended = True
        while ended:  # what ends leaves its own parents to nobody
            found = [self._call_table.calls.get(r) for e in encodings for r in e.encoders]
            idle = [c.id for c in found if c and c.is_internal and not c.encoding.num_waiting]
            ended = self._finish(idle, RequestStatus.FINISHED_ABORTED)
