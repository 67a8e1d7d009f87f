# SPDX-License-Identifier: Apache-2.0
"""The messages of an engine: named in sessions, shared by digest, freed. Neither torch nor vllm.

Where encodings lie and who needs them is `Residency`'s; this module says what becomes of messages.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from vllm_choreo.errors import LimitError, NameTakenError, UnknownMessageError
from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.semantics.history import IdSet
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.store.block_copies import Block, BlockPool, PlannedCopies
from vllm_choreo.store.digest import encoding_digest
from vllm_choreo.store.duplicates import Duplicates
from vllm_choreo.store.encoding import Adapter, Encoding, StoredMessage, copies_of
from vllm_choreo.store.groups import Blocks, CacheGroups
from vllm_choreo.store.hidden import HiddenStateIndex
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.residency import Residency
from vllm_choreo.store.session_copies import SessionCopies
from vllm_choreo.store.states import States

# Messages that will never be complete are known by their names, of all sessions together.
MAX_FAILED = 10_000


class MessageStore:
    """All messages of an engine.

    Args:
        pool: vLLM's block pool.
        block_size: tokens in a block.
        engine: properties that all encodings depend on, besides their recipes.
        is_placed: whether they depend on where they stand, too, and not on distances alone; then
            all plans are, see `CallPlan`.
        clock: tells the time in seconds, for pins.
        session_copies: how many copies of its messages a session may have; None: as many as it
            makes.
        states: states of layers without keys; None: the model has none.
        windows: sliding window of each KV cache group, see `CacheGroups`.

    Attributes:
        groups: the KV cache groups.
        tier: memory outside the KV cache for evicted encodings, or None.
        hidden: the hidden states that workers keep; None: they keep none.
        duplicates: encodings by their digests, from which others may start.
        totals: counts of messages and tokens, since the engine started.
        step: number of the step being planned.
        on_final: called with encodings whose tokens are final, or whose messages failed.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        engine: bytes = b"",
        is_placed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        session_copies: SessionCopies | None = None,
        states: States | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.groups = CacheGroups(block_size, windows)
        self.residency = Residency(pool, self.groups, states)
        self.block_size = block_size
        self.engine = engine
        self.is_placed = is_placed
        self.clock = clock
        self.tier: HostTier | None = None
        self.hidden: HiddenStateIndex | None = None
        self.duplicates = Duplicates()
        self.session_copies = session_copies or SessionCopies(sys.maxsize, sys.maxsize)
        self.totals: Counter[str] = Counter()
        self.step = 0
        self.on_final: Callable[[Encoding], None] = lambda encoding: None
        self._sessions: dict[str, dict[str, StoredMessage]] = {}
        self._failed: dict[StoredMessage, None] = {}  # in the order in which they failed

    @property
    def states(self) -> States | None:
        """States of layers without keys; None: the model has none, and reads in any order."""
        return self.residency.states

    # -- names -----------------------------------------------------------------------------

    def create(
        self,
        session: str,
        message_id: str,
        adapter: Adapter | None = None,
        tenant: str = "",
        reader: str = "",
    ) -> StoredMessage:
        """Make a new message, whose encoding has no tokens yet.

        Raises:
            NameTakenError: the session has a message of that id.
        """
        message = StoredMessage(message_id, session, tenant, reader)
        message.own = Encoding(message, Trace(message_id), adapter)
        self.register([message])
        return message

    def register(self, messages: Collection[StoredMessage]) -> None:
        """Give messages their names.

        Raises:
            NameTakenError: one is taken; then none is given.
        """
        for message in messages:
            existing = self.find(message.session, message.id)
            if existing is not None and not existing.failure:
                raise NameTakenError(
                    "this session has a message of that name; choose another, or free it first",
                    parameter="save_as",
                    value=message.id,
                )
        for message in messages:
            named = self._sessions.setdefault(message.session, {})
            if failed := named.get(message.id):
                self._failed.pop(failed, None)
            named[message.id] = message

    def find(self, session: str, message_id: str) -> StoredMessage | None:
        """Message of that id, if the session has it."""
        return self._sessions.get(session, {}).get(message_id)

    def get(self, session: str, message_id: str, parameter: str = "parents") -> StoredMessage:
        """Message that a call of `session` names.

        Raises:
            UnknownMessageError: there is none; a message of another session looks the same.
        """
        message = self.find(session, message_id)
        if message is None:
            raise UnknownMessageError(
                "there is no such message in this session (never made, or freed)",
                parameter=parameter,
                value=message_id,
            )
        return message

    def messages(self, session: str | None = None) -> list[StoredMessage]:
        """Messages of a session; of all sessions if it is None."""
        if session is not None:
            return list(self._sessions.get(session, {}).values())
        return [message for named in self._sessions.values() for message in named.values()]

    # -- encodings -------------------------------------------------------------------------

    def identify(self, encoding: Encoding) -> None:
        """Give an encoding its digest, once its tokens and its plan are known."""
        assert encoding.plan is not None and encoding.token_ids is not None
        parents = [parent.digest for parent in encoding.parents if parent.digest is not None]
        assert len(parents) == len(encoding.parents), "parents are known before their children are"
        patched = None
        if encoding.patch is not None:
            source = encoding.patch.source.digest
            assert source is not None, "what is patched is known"
            patch = encoding.patch
            patched = source, patch.start, patch.runs, patch.layers
        encoding.digest = encoding_digest(
            self.engine,
            encoding.tenant,
            encoding.adapter,
            encoding.token_ids,
            encoding.plan,
            parents,
            patched,
            encoding.nonce,
        )
        encoding.is_untrusted = bool(encoding.nonce) or any(
            needed.is_untrusted for needed in encoding.recipe
        )

    def mark_final(self, encoding: Encoding) -> None:
        """Let others share a generated message, whose tokens are final from now on."""
        self.identify(encoding)
        self.duplicates.add(encoding)
        self.on_final(encoding)

    def find_or_add_copy(self, copy: Encoding, source: Encoding, num_new: int) -> Encoding:
        """Add a new copy, or find the same one that its message has, see `Encoding.copy_key`.

        A new one is known and not resident, as if it had been evicted.

        Args:
            copy: the new copy, with its plan, without a digest.
            source: the encoding that it has the tokens of.
            num_new: tokens of it that are not as in the source.

        Raises:
            LimitError: the session has as many as it may have, and calls need all of them.
        """
        message = copy.message
        self.identify(copy)
        if found := message.copies.get(copy.copy_key):
            self.session_copies.use(found)
            return found
        copy.num_unreported = num_new
        copy.is_orphan = any(encoding.is_given_up for encoding in (source, *copy.parents))
        if not copy.is_orphan:
            while self.session_copies.is_full_for(copy):
                self._forget_copies(self.session_copies.victim(copy, {source, *copy.parents}))
            self.register_copy(copy)
        return copy

    def register_copy(self, copy: Encoding) -> None:
        """Let calls read a copy, which has its digest."""
        copy.message.copies[copy.copy_key] = copy
        for parent in copy.parents:
            parent.readers.add(copy)
        self.session_copies.add(copy)

    def _forget_copies(self, copies: Collection[Encoding]) -> None:
        """Let no further call read these copies; calls that do so go on."""
        for copy in copies:
            copy.is_orphan = True
            if copy.digest is not None:
                copy.message.copies.pop(copy.copy_key, None)
            for parent in copy.parents:
                parent.readers.discard(copy)
            self.session_copies.discard(copy)
            self.settle(copy)

    def share(self, encoding: Encoding, denied: Collection[str] = ()) -> None:
        """Start from the full blocks of an encoding of the same digest, if one holds any.

        The last block stays private: at least one token must run, for vLLM to run the request.
        With states all or nothing is shared, for none is kept inside a message: what the request
        runs then is nobody's.
        Traces of `denied` messages are not shared: what was reused would tell their tokens.
        """
        assert encoding.plan is not None and encoding.digest is not None
        position, session = encoding.plan.own_position, encoding.message.session
        denied_ids = IdSet.known(denied)

        def may_share(duplicate: Encoding) -> bool:
            is_own = duplicate.message.session == session
            is_allowed = not denied or (is_own and not duplicate.trace.holds_any(denied_ids))
            is_allowed &= duplicate.stored_position == position
            num_shared = self._num_shared(encoding, duplicate)
            return is_allowed and self.groups.can_go_on(duplicate.blocks, num_shared)

        if self.states is not None:
            self._share_whole(encoding, may_share)
        elif duplicate := self.duplicates.most_resident(encoding, may_share):
            self.hold(encoding, duplicate.blocks, self._num_shared(encoding, duplicate))
        self.duplicates.add(encoding)

    def _num_shared(self, encoding: Encoding, duplicate: Encoding) -> int:
        """Tokens that an encoding can start from: in full blocks, and not the last one."""
        num_shared = min(duplicate.num_encoded, encoding.num_tokens - 1)
        return num_shared - num_shared % self.block_size

    def _share_whole(self, encoding: Encoding, may_share: Callable[[Encoding], bool]) -> None:
        """Share all blocks, and the state, of an encoding of the same digest that has both."""
        assert self.states is not None

        def is_whole(duplicate: Encoding) -> bool:
            has_all = duplicate.is_resident and self.can_begin_with([duplicate])
            return has_all and may_share(duplicate)

        duplicate = self.duplicates.most_resident(encoding, is_whole)
        if duplicate is not None and duplicate.state is not None:
            self.hold(encoding, duplicate.blocks, encoding.num_tokens)
            self.states.share(encoding, duplicate.state, duplicate.state_step)

    def end(self, message: StoredMessage, num_tokens: int) -> dict[str, Any] | None:
        """Complete a message of which the client keeps the first `num_tokens` tokens.

        Returns:
            The report of its call, for these tokens; None if it was complete before.
        """
        encoding = message.own
        report, message.open_report = message.open_report, None
        if report is None or encoding.token_ids is None:
            return None
        num_dropped = encoding.num_tokens - num_tokens
        del encoding.token_ids[num_tokens:]
        self.residency.cut(encoding, num_tokens)
        self.mark_final(encoding)
        return {
            **report,
            "num_tokens": num_tokens,
            "encoded_tokens": report["encoded_tokens"] - num_dropped,
        }

    # -- blocks ----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin to plan the next step."""
        self.step += 1
        self.residency.block_copies.begin()
        if self.states:
            self.states.copies.begin()

    def take_block_copies(self) -> PlannedCopies:
        """End the planning; return the copies of blocks with which the step begins."""
        for tier in self._tiers():
            tier.on_planned()
        return self.residency.block_copies.take()

    def hold(self, encoding: Encoding, blocks: Blocks, num_encoded: int) -> None:
        """Make `blocks` an encoding's place in the step being planned, see `Residency.hold`."""
        self.residency.hold(encoding, blocks, num_encoded, self.step)

    def fill(self, encoding: Encoding, blocks: Blocks) -> list[tuple[int, int]]:
        """Close the gaps of an encoding in the step being planned, see `Residency.fill`."""
        return self.residency.fill(encoding, blocks, self.step)

    def on_written(self, encoding: Encoding, run: TokenRange) -> None:
        """Note that the step being planned writes the last tokens of a run."""
        self.residency.on_written(encoding, run, self.step)

    def hold_state(self, encoding: Encoding, request_id: str) -> None:
        """Make the state of a request what an encoding leaves, see `States.hold`."""
        if self.states:
            self.states.hold(encoding, request_id, self.step)

    def can_begin_with(self, encodings: Iterable[Encoding]) -> bool:
        """Return whether the step being planned can begin with the states that encodings left.

        They are read before the step runs, so they were written in earlier ones.
        """
        return self.states is None or all(
            encoding.state is not None and encoding.state_step < self.step for encoding in encodings
        )

    def evict_state(self, needed: Collection[Encoding], into_host: bool = True) -> bool:
        """Give up one state, see `States.victim`; return whether there was one.

        Args:
            into_host: whether host memory, if there is any, gets a copy before the next step.
        """
        assert self.states is not None
        victim = self.states.victim(needed, self.clock())
        if victim is not None:
            self.totals["evicted_states"] += 1
            if into_host:
                self.states.evict(victim, self.step)
            else:
                self.states.drop(victim)
        return victim is not None

    def free_a_state(self, needed: Iterable[Collection[Encoding]], is_alone: bool) -> bool:
        """Give up states until one is free; return whether one is.

        Args:
            needed: encodings that keep theirs; then, in turn, those that keep them from a request
                that runs alone.
        """
        assert self.states is not None
        if self.states.num_free:
            return True
        kept = [*needed] if is_alone else [next(iter(needed))]
        while not self.states.num_free:
            if not any(self.evict_state(some) for some in kept):
                return False
        return True

    def is_settled(self, encoding: Encoding) -> bool:
        """Return whether all keys were written before the step that is being planned."""
        is_planned = not self.residency.block_copies.is_planning
        return encoding.is_resident and (is_planned or encoding.held_in_step < self.step)

    def evict(self, encoding: Encoding, *, into_host: bool = True) -> None:
        """Give the blocks back; the recipe stays, and a copy in host memory if there is room.

        Args:
            into_host: false: no copy is made, and the blocks can be written before the next step.
        """
        if encoding.blocks:
            self.totals["evicted_messages"] += 1
            self.totals["evicted_tokens"] += encoding.num_encoded
            if self.tier and into_host and self.is_settled(encoding):
                self.tier.save(encoding)
        if self.states and into_host:
            self.states.evict(encoding, self.step)
        self.residency.drop(encoding)

    def evict_one(
        self,
        protected: Iterable[Collection[Encoding]],
        waiting_too: bool,
        *,
        into_host: bool = True,
    ) -> bool:
        """Evict the encoding that `choose_victim` chooses; return whether there was one.

        What encodings keep for no reader is given up first.
        """
        protected = [*protected]
        if self.residency.trim_one(protected[0] if protected else ()):
            return True
        victim = self.residency.victim(protected, waiting_too, self.clock())
        if victim is None:
            return False
        self.evict(victim, into_host=into_host)
        return True

    def enforce_share(self, max_blocks: int) -> None:
        """Evict idle encodings of tenants that hold more than `max_blocks` blocks."""
        for encoding in self.residency.over_share(max_blocks, self.clock()):
            self.evict(encoding)

    def restore(self, encoding: Encoding, blocks: Sequence[Block]) -> None:
        """Bring an encoding back from host memory, before the step being planned.

        Args:
            blocks: a block for each of `HostTier.restorable`; they close the gaps of what is
                resident.
        """
        assert self.tier is not None and encoding.plan is not None
        copy, places = self.tier.find(encoding), self.tier.restorable(encoding)
        null_block = self.residency.pool.null_block
        table = [[null_block] * len(of_group) for of_group in copy.blocks]
        for (group, index), block in zip(places, blocks, strict=True):
            table[group][index] = block
        if encoding.is_resident:
            self.fill(encoding, table)
        else:
            self.hold(encoding, table, copy.num_encoded)
            self.residency.move(encoding, copy.stored_position)
        # What nobody waits for is trimmed at once.
        held = [(g, i) for g, i in places if not encoding.blocks[g][i].is_null]
        self.tier.load(encoding, held, [encoding.blocks[g][i] for g, i in held])
        self.totals["restored_messages"] += 1
        self.totals["restored_tokens"] += copy.num_encoded

    def restore_state(self, encoding: Encoding) -> None:
        """Bring a state back from host memory, for calls that begin in the step being planned."""
        assert self.states is not None
        self.states.restore(encoding, self.step)
        self.totals["restored_states"] += 1

    def empty(self) -> None:
        """Drop all keys and values that no running call reads, host memory included.

        For a change of the weights that computed them: a call that reads a message has it encoded
        again.
        """
        self.duplicates.clear()
        for encoding in self.residency.holding():
            if self.states:
                self.states.drop(encoding)
            if not encoding.num_readers:
                self.residency.drop(encoding)
        for tier in self._tiers():
            tier.clear()
        if self.hidden:
            self.hidden.clear()

    def _tiers(self) -> list[HostTier]:
        """Host memory of blocks and of states, as far as there is any."""
        return [tier for tier in (self.tier, self.states and self.states.tier) if tier]

    # -- pins and the end ------------------------------------------------------------------

    def pin(self, messages: Collection[StoredMessage], ttl: float, max_blocks: int) -> None:
        """Evict the own encodings of `messages` last, for `ttl` seconds.

        Raises:
            LimitError: with these, pinned messages would take more than `max_blocks` blocks.
        """
        num_blocks = sum(
            self.groups.num_kept_blocks(message.own.num_tokens)
            for message in {*self.pinned(), *messages}
        )
        if num_blocks > max_blocks:
            raise LimitError(
                f"pinned messages may take {max_blocks} blocks of the KV cache "
                "(additional_config.choreo.pinned_share); unpin some, or let pins expire",
                parameter="messages",
                value=f"{num_blocks} blocks",
            )
        for message in messages:
            message.pinned_until = self.clock() + ttl

    def pinned(self) -> list[StoredMessage]:
        now = self.clock()
        return [message for message in self.messages() if message.pinned_until > now]

    def free(self, message: StoredMessage) -> None:
        """Free a message of a session: unknown to new calls, gone when the last one ends."""
        message.freed = True
        self._forget(message)
        self.fail_if_lost(message)
        self.settle(message.own)
        # No call can list the message any more, and so none can need these.
        self._forget_copies(copies_of([message]))

    def fail_if_lost(self, message: StoredMessage) -> None:
        """Fail an open message that was freed: nobody can say any more how much of it is kept."""
        if message.freed and message.open_report is not None:
            message.open_report = None
            self.fail(message, "it was freed before its client told how many tokens it keeps")

    def fail(self, message: StoredMessage, reason: str) -> None:
        """Mark a message that will never be complete; a call that names it is told the reason.

        Only the latest of many that failed are known: a session that runs for weeks does not grow.
        """
        if message.failure is not None:
            return  # by its request's end, before its client told that it keeps nothing of it
        message.failure = reason
        self.on_final(message.own)
        self.settle(message.own)
        if self.find(message.session, message.id) is not message:
            return
        # Nothing but its name is needed: tokens and parents go, unless others were encoded with it.
        name = StoredMessage(message.id, message.session, message.tenant, failure=reason)
        name.own = Encoding(name, Trace(message.id))
        self._sessions[message.session][message.id] = name
        self._failed[name] = None
        if len(self._failed) > MAX_FAILED:
            oldest = next(iter(self._failed))
            self._forget(oldest)

    def _forget(self, message: StoredMessage) -> None:
        """Take a message's name away, if it is still its own."""
        self._failed.pop(message, None)
        named = self._sessions.get(message.session, {})
        if named.get(message.id) is message:
            del named[message.id]
            if not named:
                del self._sessions[message.session]

    def settle(self, encoding: Encoding) -> None:
        """Give back the blocks of an encoding that was given up, once nobody needs them.

        A patch needs its source until it has a place, and again when it has lost it.
        """
        if encoding.is_given_up:
            self.duplicates.discard(encoding)
            if not encoding.in_use and not encoding.num_wanting:
                self.residency.drop(encoding)
                for tier in self._tiers():
                    tier.discard(encoding)
                if self.hidden:
                    self.hidden.release(encoding)
        if encoding.patch is not None:
            self.settle(encoding.patch.source)
