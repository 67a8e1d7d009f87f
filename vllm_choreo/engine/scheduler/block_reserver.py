# SPDX-License-Identifier: Apache-2.0
"""Blocks for waiting calls: parents are brought back, or encoded again, in the calls' turn."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from vllm_choreo.engine.scheduler.adapters import Adapters, adapter_replaced_error
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.internal import InternalRequests
from vllm_choreo.engine.scheduler.patcher import Patcher
from vllm_choreo.engine.scheduler.refusals import Refusals
from vllm_choreo.engine.scheduler.room import Room
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.errors import ChoreoError, LimitError
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import indices_of


class BlockReserver:
    """Preparation of waiting calls at the beginning of a step.

    Args:
        may_start: returns whether something may be begun for a call.
        enqueue: puts a request of ours into vLLM's queue, right before another one.
        enqueue_woken: puts a request there whose parents are known now, by its arrival.
        finish: vLLM's `finish_requests`.
        running: returns the requests that run.

    Attributes:
        short: calls of the step being planned for which there was too little room, each with the
            error that names the limit; None: the KV cache.
        has_begun: True if an encoding was brought back, or begun, for the step being planned.
    """

    def __init__(
        self,
        call_table: CallTable,
        pool: BlockPool,
        refusals: Refusals,
        adapters: Adapters,
        internal: InternalRequests,
        patcher: Patcher,
        *,
        may_start: Callable[[ScheduledCall], bool],
        enqueue: Callable[[Request, Request], None],
        enqueue_woken: Callable[[Request], None],
        finish: Callable[..., Any],
        running: Callable[[], Collection[Request]],
    ) -> None:
        self._call_table = call_table
        self._store = call_table.store
        self._pool = pool
        self._refusals = refusals
        self._adapters = adapters
        self._internal = internal
        self._patcher = patcher
        self._may_start = may_start
        self._enqueue = enqueue
        self._enqueue_woken = enqueue_woken
        self._finish = finish
        self._running = running
        self.short: dict[ScheduledCall, LimitError | None] = {}
        self.has_begun = False

    def prepare_waiting(self) -> None:
        """Resolve calls whose parents are known now; have evicted parents encoded again.

        The first in turn always gets what it needs, or has what it takes to start if it is ready;
        later ones get only what fits beside, or calls would evict one another's parents in turn.
        """
        self.short, self.has_begun = {}, False
        self.end_unneeded()
        self._end_lost_runs()
        first, room = None, Room()
        self._enter_woken()
        waiting = self._call_table.turns.in_order()
        for index, call in enumerate(waiting):  # grows: by what encodes again, and who is woken
            if call.id not in self._call_table.calls or call.beneficiary.id in self._refusals:
                continue
            try:
                is_resolved = self._call_table.resolve(call)
                for woken in self._enter_woken():
                    insort(waiting, woken, index + 1, key=attrgetter("turn"))
                if not (is_resolved and self._may_start(call)):
                    continue
                if first is None:
                    first, room = call.beneficiary, self._room()
                if not self._call_table.is_ready(call):
                    self._prepare(call, waiting, room, call.beneficiary is first)
                elif call is first and not call.is_internal:  # ours are promised
                    room.take(self._num_blocks_ahead(call.request), 1)
            except ChoreoError as error:
                self._refusals.refuse(call.beneficiary.id, error)
            except Exception as error:
                self._refusals.refuse_unexpected(call.beneficiary.id, error)

    def _enter_woken(self) -> list[ScheduledCall]:
        """Put the calls whose parents are known now into vLLM's queue."""
        woken = self._call_table.take_woken()
        for call in woken:
            self._enqueue_woken(call.request)
        return woken

    def _prepare(
        self, call: ScheduledCall, waiting: list[ScheduledCall], room: Room, is_first: bool
    ) -> None:
        """Begin to encode what a call lacks, as far as there is room.

        Args:
            waiting: calls that wait; those that encode for this one are appended.
            room: room that is left for the step; what is begun takes of it.
            is_first: True if it may take blocks of encodings that others wait for, and those
                promised to requests that run, unless one of these comes before it.
        """
        limit = room if not is_first or self._runs_before(call.beneficiary) else Room()
        if is_first:
            self._call_table.turns.adopt_encoders(call)
        for wanted in self._lacks(call):
            begins = wanted.state is None and wanted in self._call_table.states.begun_with(call)
            if begins:
                restored = self._restore_whole(wanted, call, limit)
                if restored is None:
                    continue  # a call that runs has to end first
            else:
                restored = self._restore(wanted, call, limit)
            if not restored and not self._give_up_patch(wanted, call):
                continue
            encoding = wanted if restored else self._lacking(wanted)
            if encoding is not wanted:
                restored = self._restore(encoding, call, limit)
            if restored:
                room.take(restored, int(begins))
                self._count_served(call, is_first)
                continue
            if encoding.adapter and not self._adapters.is_current(encoding.adapter):
                self._refuse_readers(encoding)
                break
            if self._is_blocked(encoding):
                continue
            need = self._num_blocks(encoding), 1
            if limit.has(*need):
                room.take(*need)
                waiting += self._encode_again(encoding, call, is_first)
        if self._patcher.stager.can_watch(call):
            need = self._patcher.stager.num_scratch_blocks(call), 0
            if limit.has(*need):
                room.take(*need)
                self._watch(call, is_first)

    def _runs_before(self, call: ScheduledCall) -> bool:
        """Return whether a request runs that comes before a call in turn.

        It would be preempted for what that call begins, and take it back when it starts again.
        """
        for request in self._running():
            other = self._call_table.calls.get(request.request_id)
            if other is not None and other.beneficiary is call:
                continue
            if self._call_table.turns.of(request) < self._call_table.turns.of(call.request):
                return True
        return False

    def refuse_too_large(self, waiting: Iterable[Request], is_tried: Callable[..., bool]) -> None:
        """Refuse, when no call can get on, the first one that found too little room."""
        for request in waiting:
            call = self._call_table.calls.get(request.request_id)
            if call is None or not is_tried(request.status):
                continue
            if error := self.short.get(call):
                self._refusals.refuse(call.beneficiary.id, error)
                return
            if call in self.short or self._call_table.is_ready(call):
                self._refusals.refuse_too_large(call.beneficiary)
                return

    def _refuse_readers(self, encoding: Encoding) -> None:
        """Refuse the calls that wait for an encoding whose adapter is gone, even indirectly."""
        assert encoding.adapter is not None
        error = adapter_replaced_error(encoding.adapter, encoding.message.id)
        for call in self._call_table.readers_of(encoding):
            # One that is ready sees the end of it alone, and has that.
            if not call.is_internal and not self._call_table.is_ready(call):
                self._refusals.refuse(call.id, error)

    def end_unneeded(self) -> None:
        """End encoding again for calls that have ended, and in turn what was encoded for that."""
        unneeded = self._call_table.unneeded
        while unneeded:
            ended = [call.id for call in unneeded if call.id in self._call_table.calls]
            unneeded.clear()
            self._finish(ended, RequestStatus.FINISHED_ABORTED)

    def _lacks(self, call: ScheduledCall) -> Iterator[Encoding]:
        """Encodings that a call lacks, in the order of its parents.

        None reads one that could not be begun now: it would be queued before that, and the call
        would wait for one more step.
        """
        late: set[Encoding] = set()
        for wanted in self._call_table.missing(call):
            if late.isdisjoint(wanted.parents):
                yield wanted
            if not (wanted.is_resident or wanted.encoders):
                late.add(wanted)

    def _restore(self, encoding: Encoding, reader: ScheduledCall, limit: Room) -> int:
        """Bring an encoding back from host memory, if there is room for it.

        It is left there if what the reader sees of it is not, or while a request encodes it.

        Returns:
            Number of blocks that it takes; 0: it is not brought back.
        """
        tier, blocks_of = self._store.tier, self._call_table.blocks
        if tier is None or encoding.encoders:
            return 0
        seen = [wanted for parent, wanted in blocks_of.wanted(reader) if parent is encoding]
        if encoding.is_kept_whole and self._store.groups.has_windows:
            seen.append(self._store.groups.whole(encoding.num_tokens))
        if not all(tier.completes(encoding, wanted) for wanted in (None, *seen)):
            return 0
        need = len(tier.restorable(encoding))
        if not limit.has(need, 0):
            return 0
        tier.protect(encoding)  # what makes room for it is saved there
        while self._pool.get_num_free_blocks() < need:
            if not self._store.evict_one(reader.needed(), waiting_too=False):
                return 0
        blocks = self._pool.get_new_blocks(need)
        encoding.is_kept_whole |= blocks_of.sees_more(reader, encoding)
        self._store.restore(encoding, blocks)
        self.has_begun = True
        self._pool.free_blocks(blocks)  # the store holds its own references
        return need

    def _restore_whole(self, encoding: Encoding, reader: ScheduledCall, limit: Room) -> int | None:
        """Bring back from host memory what a call that begins behind an encoding needs of it.

        Returns:
            Number of blocks that it takes, at least one; 0: it has to be encoded again. None: there
            is no state for it yet.
        """
        states, tier = self._store.states, self._store.tier
        if states is None or states.tier is None or encoding not in states.tier:
            return 0
        if not encoding.is_resident and (tier is None or encoding not in tier):
            return 0
        states.tier.protect(encoding)
        is_alone = not self._running() and self._call_table.turns.is_first(reader.request)
        needed = self._call_table.states.needed(reader)
        if not (limit.has(0, 1) and self._store.free_a_state(needed, is_alone)):
            return None
        need = 0
        if not encoding.is_resident and not (need := self._restore(encoding, reader, limit)):
            return 0
        self._store.restore_state(encoding)
        self.has_begun = True
        return max(1, need)

    def _give_up_patch(self, encoding: Encoding, reader: ScheduledCall) -> bool:
        """Drop a patch with gaps in what a call sees: it is made again, of more of its source.

        Returns:
            Whether it can be made now; no if others read it. True of what is no patch.
        """
        if encoding.patch is None:
            return True
        if encoding.num_readers:
            return False
        sees_more = self._call_table.blocks.sees_more(reader, encoding)
        if encoding.is_resident:
            self._store.evict(encoding, into_host=False)
        encoding.is_kept_whole |= sees_more
        return True

    def _lacking(self, encoding: Encoding) -> Encoding:
        """Encoding that has to be there first: a patch's source, or what a patch by layers reads.

        If it is there, the encoding itself. What lacks a part is kept whole from now on.
        """
        patch, groups = encoding.patch, self._store.groups
        if patch is None:
            return encoding
        source = patch.source
        there = indices_of(source.blocks) if source.is_resident else groups.held(source.num_tokens)
        is_served = self._patcher.is_served_by(encoding, there)
        source.is_kept_whole |= not is_served
        if not (is_served and source.is_resident) or self._lacks_hidden(source):
            return source
        if patch.layers is not None and groups.has_windows:
            for parent, seen in self._call_table.blocks.wanted_by_patch(encoding):
                if parent.is_resident and not parent.has(seen):
                    parent.is_kept_whole = True
                    return self._lacking(parent)
        return encoding

    def _lacks_hidden(self, encoding: Encoding) -> bool:
        """Return whether a patch that is waited for begins with hidden states that are not held."""
        hidden = self._store.hidden
        return encoding.num_entering > 0 and hidden is not None and hidden.find(encoding) is None

    def _capture_again(self, encoding: Encoding, serves: ScheduledCall) -> bool:
        """Have the hidden states of an encoding captured while all of it is encoded again.

        Returns:
            Whether they can be now: there is room, and nobody reads its keys.
        """
        if encoding.num_readers:
            return False
        assert self._store.hidden is not None
        if error := self._store.hidden.add_again(encoding):
            self.short[serves] = error
            return False
        self._store.evict(encoding, into_host=False)
        if self._store.tier:
            self._store.tier.discard(encoding)
        return True

    def _is_blocked(self, encoding: Encoding) -> bool:
        """Return whether a patch by layers reads an encoding of this step, or of a later one."""
        by_layers = encoding.patch is not None and encoding.patch.layers is not None
        return by_layers and not self._patcher.stager.is_ready(encoding)

    def _num_blocks(self, encoding: Encoding) -> int:
        """Number of blocks that encoding it takes."""
        if encoding.patch:
            return self._patcher.num_blocks(encoding)
        return self._store.groups.num_blocks(encoding.num_tokens)

    def _num_blocks_ahead(self, request: Request) -> int:
        """Number of blocks that a request takes for tokens that it has not computed yet."""
        call, num_there = self._call_table.calls.get(request.request_id), 0
        if call is not None and call.run is not None:
            return 0  # its slots exist
        if call is not None and call.plan is not None:
            num_there = call.plan.base
        groups, num_there = self._store.groups, max(num_there, request.num_computed_tokens)
        num_tokens = request.num_tokens_with_spec + request.num_output_placeholders
        return groups.num_blocks(num_tokens) - groups.num_blocks(num_there)

    def _room(self) -> Room:
        """Blocks and states that are free, or idle and so evictable, less those promised.

        They are promised to what runs, and to what encodes again.
        """
        waiting = [c.request for c in self._call_table.waiting.values() if c.is_internal]
        promised = sum(map(self._num_blocks_ahead, (*self._running(), *waiting)))
        idle = self._store.residency.num_idle_blocks
        num_blocks = self._pool.get_num_free_blocks() + idle - promised
        if self._store.states is None:
            return Room(num_blocks)
        needed = next(self._call_table.states.needed(None))
        num_states = self._store.states.num_free + self._store.states.num_idle(needed)
        return Room(num_blocks, num_states - len(waiting))

    def _encode_again(
        self, encoding: Encoding, serves: ScheduledCall, is_first: bool
    ) -> list[ScheduledCall]:
        """Queue requests that encode a missing encoding, right before the call they serve."""
        if encoding.encoders or not self._can_begin(encoding):
            return []
        is_whole = encoding.is_kept_whole or self._call_table.blocks.sees_more(serves, encoding)
        is_for_more = self._store.states or self._store.groups.has_windows
        if is_for_more and encoding.is_resident and not encoding.num_readers:
            # It is encoded again for its state, or its gaps: its keys and values come with that.
            self._store.evict(encoding, into_host=False)
        encoding.is_kept_whole = is_whole
        if encoding.patch and not self._place(encoding, serves, is_first):
            return []
        if self._lacks_hidden(encoding) and not self._capture_again(encoding, serves):
            return []
        encoding.is_kept_whole = is_whole
        self.has_begun = True
        self._count_served(serves, is_first)
        if encoding.patch:
            return [] if encoding.patch.layers else self._write_runs(encoding, serves)
        self._store.totals["encoded_again_messages"] += 1
        num_there = 0 if self._store.states or encoding.is_resident else encoding.num_encoded
        self._store.totals["encoded_again_tokens"] += encoding.num_tokens - num_there
        request = self._internal.make(encoding, serves.request)
        call = self._call_table.open_encode(request, encoding, serves)
        self._enqueue(request, serves.request)
        return [call]

    def _can_begin(self, encoding: Encoding) -> bool:
        """Return whether an encoding can be made while others read what there is of it.

        Its gaps can be closed then by blocks of its own request, whose keys are rotated to where
        that stands. What was loaded may be stored elsewhere, and a patch is no request: these wait.
        """
        if not encoding.num_readers:
            return True
        assert encoding.plan is not None
        return not encoding.patch and encoding.stored_position == encoding.plan.own_position

    def _count_served(self, call: ScheduledCall, is_first: bool) -> None:
        """Count what is begun for a call, and refuse it if that runs in circles."""
        if is_first:
            self._call_table.count_served(call.beneficiary)
            if self._call_table.runs_in_circles(call.beneficiary):
                self._refusals.refuse_too_large(call.beneficiary)

    def _place(self, encoding: Encoding, serves: ScheduledCall, is_first: bool) -> bool:
        """Give a patch its blocks; a patch by layers is then written before the step."""
        assert encoding.patch is not None

        def need() -> int:
            return self._patcher.num_blocks(encoding)

        # What is placed may lie deeper than what the call reads itself.
        if not self._evict_until_free(need, serves, is_first, [encoding.patch.source]):
            return False
        self._patcher.place(encoding)
        self._store.totals["repaired_tokens"] += encoding.patch.num_tokens
        return True

    def _write_runs(self, encoding: Encoding, serves: ScheduledCall) -> list[ScheduledCall]:
        """Queue a request for each run of a patch that has its place."""
        patch, size = encoding.patch, self._store.block_size
        assert patch is not None
        calls: list[ScheduledCall] = []
        for start, stop in patch.runs:
            first = patch.start - patch.start % size
            request = self._internal.make(encoding, serves.request, first, stop)
            calls.append(self._call_table.open_run(request, encoding, (start, stop), serves))
            self._enqueue(request, serves.request)
        return calls

    def _watch(self, call: ScheduledCall, is_first: bool) -> None:
        """Have a call look at its parents before the step being planned."""
        stager = self._patcher.stager
        if self._evict_until_free(lambda: stager.num_scratch_blocks(call), call, is_first):
            self._store.totals["scored_tokens"] += call.request.num_prompt_tokens
            stager.watch(call)
            self.has_begun = True

    def _evict_until_free(
        self,
        need: Callable[[], int],
        call: ScheduledCall,
        is_first: bool,
        kept: Collection[Encoding] = (),
    ) -> bool:
        """Evict messages that a call can do without, and not `kept`, until `need()` are free.

        Only of the first call it can be said that it is short, for it may take from all others.
        """
        while self._pool.get_num_free_blocks() < need():
            now, *later = call.needed()
            protected = [now.union(kept), *later]
            if not self._store.evict_one(protected, is_first and not self._running()):
                if is_first:
                    self.short[call] = None
                return False
        return True

    def _end_lost_runs(self) -> None:
        """End the runs of patches that were evicted; such a patch is begun anew."""
        lost = [
            call.id
            for call in self._call_table.waiting.values()
            if call.run is not None and call.run not in call.encoding.unwritten
        ]
        if lost:
            self._finish(lost, RequestStatus.FINISHED_ABORTED)
