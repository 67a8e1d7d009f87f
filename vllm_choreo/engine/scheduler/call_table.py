# SPDX-License-Identifier: Apache-2.0
"""Choreographed calls inside the scheduler: from named parents to adopted blocks.

The way of a call: `open` (parents named) -> `resolve` (their lengths known: positions decided,
virtual sequence written into vLLM's request) -> `is_ready` (their keys and values exist, at the
latest in the step being planned) -> `on_scheduled` (blocks adopted) -> `close`.

A call is also how something is *encoded again*: after eviction, or to give the last sampled token
its key and value, for which vLLM has no need when a request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vllm.v1.request import Request

from vllm_choreo.engine.scheduler.call_blocks import CallBlocks
from vllm_choreo.engine.scheduler.call_states import CallStates
from vllm_choreo.engine.scheduler.parking import Parking
from vllm_choreo.engine.scheduler.pictures import copied_pictures
from vllm_choreo.engine.scheduler.planning import plan_call, watching_of, write_virtual_sequence
from vllm_choreo.engine.scheduler.report import report_of
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.engine.scheduler.turns import Turns
from vllm_choreo.engine.step import HiddenCapture, RequestSpans, request_spans
from vllm_choreo.errors import CyclicParentsError, ParentFailedError, RepairError
from vllm_choreo.repair.runs import TokenRange
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import trace_of
from vllm_choreo.store.encoding import Adapter, Encoding
from vllm_choreo.store.groups import Blocks
from vllm_choreo.store.hidden import check_memory
from vllm_choreo.store.pictures import Picture
from vllm_choreo.store.store import MessageStore

# Contention may make a call lose what was encoded again for it, but not this often.
_ROUNDS = 8


class CallTable:
    """Calls in flight. Knows messages and plans; queues and allocation are the scheduler's.

    Args:
        reprioritize: gives requests another priority in vLLM's queue; None: vLLM starts them as
            they come.

    Attributes:
        blocks: blocks that calls read, and that they go on from.
        states: states that they begin with.
        turns: their order.
        min_run_tokens: tokens that a run has at least. With speculative decoding vLLM pads a
            request of one token to more, which would be written over the tokens after the run.
        calls: all of them, by request id.
        waiting: calls that are not scheduled, and whose parents' lengths are known, by request id.
        parking: calls whose parents' lengths are not all known.
        woken: calls new in `waiting`, whose requests vLLM's queue has yet to get.
        unneeded: calls to be ended: they encode again for calls that have ended, and nobody else
            waits for the encoding.
    """

    def __init__(
        self,
        store: MessageStore,
        max_model_len: int,
        min_run_tokens: int = 1,
        reprioritize: Callable[[Collection[Request], int], None] | None = None,
    ) -> None:
        self.store = store
        self.blocks = CallBlocks(store)
        self.min_run_tokens = min_run_tokens
        self.block_size = store.block_size
        self.max_model_len = max_model_len
        self.calls: dict[str, ScheduledCall] = {}
        self.waiting: dict[str, ScheduledCall] = {}
        self.turns = Turns(self.calls, self.waiting, reprioritize)
        self.states = CallStates(store, self.waiting)
        self.woken: list[ScheduledCall] = []
        self.unneeded: list[ScheduledCall] = []
        self.parking = Parking()
        store.on_final = self.wake
        # How many calls of callers have begun, and ended: progress of somebody.
        self._num_events = 0

    # -- arrival ---------------------------------------------------------------------------

    def open(
        self,
        request: Request,
        params: ChoreoParams,
        adapter: Adapter | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> ScheduledCall:
        """Enter a new call.

        Args:
            pictures: pictures among its new tokens.

        Raises:
            ChoreoError: it can never run.
        """
        name = params.save_as or request.request_id
        if any(parent.id == name for parent in params.parents):
            raise CyclicParentsError(
                "a call cannot wait for the message that it makes itself; leave it out",
                parameter="parents",
                value=name,
            )
        parents = tuple(self.store.get(params.session, p.id).own for p in params.parents)
        origin = self.store.get(params.session, params.copy_of).own if params.copy_of else None
        traces = [parent.trace for parent in parents]
        trace = trace_of(name, traces, params.exact, origin.trace if origin else None)
        trace.check(params.deny)
        if origin is not None:
            pictures = copied_pictures(origin, request.prompt_token_ids or (), pictures)
        most_tokens = request.num_prompt_tokens + (request.max_tokens * (params.kind == "decode"))
        most_tokens = min(most_tokens, self.max_model_len)
        check_memory(self.store.hidden, params.keep_hidden, most_tokens)
        message = self.store.create(params.session, name, adapter, params.tenant, params.reader)
        message.request = request.request_id
        encoding = message.own
        encoding.parents, encoding.trace, encoding.pictures = parents, trace, pictures
        if self.store.hidden and params.keep_hidden:
            self.store.hidden.add(encoding, params.keep_hidden, most_tokens)
        if params.kind == "prefill":
            encoding.token_ids = list(request.prompt_token_ids or ())
            request.max_tokens = 1  # vLLM samples one; it is no part of the message
        return self._add(ScheduledCall(request, encoding, parents, params))

    def open_encode(
        self, request: Request, encoding: Encoding, serves: ScheduledCall | None
    ) -> ScheduledCall:
        """Enter a call that encodes the missing tokens of a known encoding."""
        call = ScheduledCall(request, encoding, encoding.parents, None, serves)
        call.closes_gaps = self.store.groups.has_windows and encoding.is_resident
        return self._add(call)

    def open_run(
        self, request: Request, encoding: Encoding, run: TokenRange, serves: ScheduledCall
    ) -> ScheduledCall:
        """Enter a call that writes one run of a patch."""
        return self._add(ScheduledCall(request, encoding, encoding.parents, None, serves, run))

    def _add(self, call: ScheduledCall) -> ScheduledCall:
        # Choreographed keys and values stay out of vLLM's prefix cache: nothing is hashed.
        call.request.block_hashes.clear()
        call.request._block_hasher = None
        call.request.skip_reading_prefix_cache = True
        self.store.residency.add_encoder(call.encoding, call.id)
        self.store.residency.wait_for(call.reads)
        self.turns.give(call)
        self.calls[call.id] = call
        if not self.parking.park(call):
            self.waiting[call.id] = call
        return call

    # -- waiting ---------------------------------------------------------------------------

    def is_parked(self, call_id: str) -> bool:
        """Return whether a request waits for a parent that is not known yet."""
        call = self.calls.get(call_id)
        return call is not None and call.parked_on is not None

    def wake(self, encoding: Encoding) -> None:
        """Go on with the calls that wait for an encoding, if it is known now, or failed."""
        for call in self.parking.take(encoding):
            self.waiting[call.id] = call
            self.woken.append(call)

    def take_woken(self) -> list[ScheduledCall]:
        """Take the calls whose requests vLLM's queue has yet to get."""
        woken, self.woken = self.woken, []
        return [call for call in woken if call.id in self.calls]

    def resolve(self, call: ScheduledCall) -> bool:
        """Decide positions and write the virtual sequence, once all parents are known.

        Returns:
            True if they are known. The call has its plan then, unless it has to look at its
            parents first.

        Raises:
            ChoreoError: it does not fit, or a parent failed.
        """
        if call.plan is not None:
            return True
        encoding = call.encoding
        # What has its plan has parents that were known, whatever became of their messages.
        for parent in call.parents if encoding.plan is None else ():
            if parent.message.failure:
                raise ParentFailedError(
                    f"the parent was never completed: {parent.message.failure}",
                    parameter="parents",
                    value=parent.message.id,
                )
        # A prefill's tokens are known before its own parents are, and with them its plan.
        if not all(parent.is_known and parent.plan for parent in call.parents):
            return False
        if encoding.plan is None:
            call.watching = call.watching or watching_of(call, self.store, self.max_model_len)
            if call.watching is not None and call.watching.attention is None:
                return True
            plan, parents = plan_call(call, self.store, self.max_model_len)
            self._check_runs(parents)
            # Nothing is refused from here on: with its plan the message counts as known.
            encoding.plan = plan
            self._read_instead(call, parents)
            if encoding.is_known:
                self.store.identify(encoding)
            self.wake(encoding)
        call.plan = encoding.plan
        write_virtual_sequence(call, self.block_size, self.max_model_len)
        return True

    def on_attention(self, attention: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take in the attention of calls that looked at their parents; some may have ended."""
        for call_id, by_parent in attention.items():
            call = self.calls.get(call_id)
            if call is not None and call.watching is not None:
                call.watching.attention = by_parent

    def _check_runs(self, parents: Sequence[Encoding]) -> None:
        patches = [p.patch for p in parents if p.patch and not p.patch.layers]
        runs = [run for patch in patches for run in patch.runs]
        if any(stop - start < self.min_run_tokens for start, stop in runs):
            raise RepairError(
                f"with speculative decoding a run needs {self.min_run_tokens} tokens at least; "
                "join it with a neighbour, or leave it out",
                parameter="repair",
                value=runs,
            )

    def _read_instead(self, call: ScheduledCall, parents: tuple[Encoding, ...]) -> None:
        """Have a call wait for other parents than those that it listed."""
        if parents == call.parents:
            return
        listed, call.parents, call.encoding.parents = call.parents, parents, parents
        self.store.residency.wait_for(parents)
        self.store.residency.leave(listed, reading=False)
        for parent in listed:
            self.store.settle(parent)

    def is_ready(self, call: ScheduledCall) -> bool:
        """Return whether all that the call reads exists by the step being planned.

        A parent whose last tokens are encoded in the same step counts: in every layer all keys
        and values of a batch are stored before any query reads.
        """
        if call.is_scheduled:  # it holds the blocks already
            return True
        if call.run is not None and call.encoding.unwritten[:1] != [call.run]:
            return False  # runs are written in their order, for each reads those before it
        is_there = call.plan is not None and all(
            parent.has(wanted) for parent, wanted in self.blocks.wanted(call)
        )
        return is_there and self.store.can_begin_with(self.states.begun_with(call))

    def missing(self, call: ScheduledCall) -> list[Encoding]:
        """Parents that must be encoded again, and that no call encodes yet."""
        begins_with = self.states.begun_with(call)
        found = [
            parent
            for parent, wanted in self.blocks.wanted(call)
            if parent.is_known and not parent.encoders
            if not parent.has(wanted) or (parent.state is None and parent in begins_with)
        ]
        return list(dict.fromkeys(found))

    def count_served(self, call: ScheduledCall) -> None:
        """Count something encoded again, or brought back, on behalf of a caller's call."""
        if call.served_since != self._num_events:
            call.served_since, call.num_served = self._num_events, 0
        call.num_served += 1

    def runs_in_circles(self, call: ScheduledCall) -> bool:
        """Return whether encodings again for this call evict one another.

        True if, while no caller's call began or ended, there were several times as many as its
        recipes hold, or were brought back. That happens when encodings that must be resident
        together do not fit into the pool: each evicts what the one before it made.
        """
        if call.num_served <= _ROUNDS:
            return False
        if not call.max_served:
            recipes, frontier = set(call.parents), list(call.parents)
            while frontier:
                fresh = [p for p in frontier.pop().recipe if p not in recipes]
                recipes.update(fresh)
                frontier += fresh
            call.max_served = _ROUNDS * len(recipes)
        return call.num_served > call.max_served

    # -- blocks ----------------------------------------------------------------------------

    def share_duplicate(self, call: ScheduledCall) -> None:
        """Let a call that is about to start share the blocks of an encoding of the same digest."""
        encoding, params = call.encoding, call.beneficiary.params
        # A copy that is encoded for the first time is new, too.
        is_new = not call.is_internal or encoding.num_unreported > 0
        # What somebody else encoded ran without its hidden states being captured.
        is_new = is_new and not encoding.hidden_layers
        # Nor is it known how likely its tokens were.
        is_new = is_new and not call.wants_prompt_logprobs
        if encoding.is_known and not encoding.num_encoded and is_new:
            self.store.share(encoding, params.deny if params else ())
            call.num_shared = encoding.num_encoded
            if encoding.is_copy:
                encoding.num_unreported = encoding.num_tokens - encoding.num_encoded

    @contextmanager
    def passing_on(self, finished: ScheduledCall) -> Iterator[None]:
        """Keep, within the context, what a call reads in its blocks for another to take over."""
        reads = list(finished.reads)
        self.store.residency.wait_for(reads)
        yield
        self.store.residency.leave(reads, reading=False)
        for encoding in reads:
            self.store.settle(encoding)

    def take_over(self, call: ScheduledCall, finished: ScheduledCall) -> None:
        """Let `call` go on in the blocks of `finished`: it reads its parents where they lie."""
        self._mark_scheduled(call, finished.stored_positions)

    def on_scheduled(self, call: ScheduledCall, blocks: Blocks, up_to: int) -> None:
        """Note that a call got slots: its block tables, and the end of the step's tokens.

        Args:
            blocks: the request's block table of each KV cache group.
            up_to: virtual index before which all tokens are encoded after the step.
        """
        assert call.plan is not None
        if not call.is_scheduled:
            self._mark_scheduled(call, call.stored_positions)
        encoding, num_encoded = call.encoding, up_to - call.plan.base
        if call.run is not None:
            if num_encoded >= call.run[1] and call.run in encoding.unwritten:
                self.store.on_written(encoding, call.run)
        elif encoding.is_known and num_encoded >= encoding.num_tokens:
            own = self.blocks.own_part(call, blocks)
            if not encoding.is_resident:
                self.store.hold(encoding, own, encoding.num_tokens)
            elif call.closes_gaps:
                assert encoding.stored_position == call.plan.own_position
                call.closed_gaps += self.store.fill(encoding, own)
            if encoding.state is None:
                self.store.hold_state(encoding, call.id)

    def _mark_scheduled(self, call: ScheduledCall, stored_positions: Sequence[int] | None) -> None:
        if stored_positions is None:
            stored_positions = [parent.stored_position for parent in call.parents]
        call.is_scheduled, call.stored_positions = True, stored_positions
        self._num_events += not call.is_internal
        del self.waiting[call.id]
        self.store.residency.read(call.reads)

    def on_preempted(self, call: ScheduledCall) -> None:
        """Have a call that lost its blocks wait again; its parents may be evicted meanwhile."""
        if call.is_scheduled:
            self._take_back(call)
            call.is_scheduled, call.stored_positions, call.closed_gaps = False, None, []
            self.waiting[call.id] = call
            self.store.residency.wait_again(call.reads)

    def _take_back(self, call: ScheduledCall) -> None:
        """Undo that a call's encoding is resident, if it was preempted in its very last step.

        With priorities, a call may lose its place in the step that encodes its last tokens.
        """
        encoding, states = call.encoding, self.store.states
        if states is not None and encoding.state_step == self.store.step:
            states.drop(encoding)
        if not encoding.is_known or encoding.held_in_step != self.store.step:
            return
        if call.closed_gaps:
            self.store.residency.open_gaps(encoding, call.closed_gaps)
        elif call.run is None:
            self.store.residency.drop(encoding)
        elif call.run not in encoding.unwritten:
            self.store.residency.on_unwritten(encoding, call.run)

    def spans(self, call: ScheduledCall) -> RequestSpans:
        """Spans of a call for the workers; valid for as long as it stays scheduled."""
        assert call.plan is not None and call.stored_positions is not None
        start = call.encoding.patch.start if call.run and call.encoding.patch else 0
        return request_spans(
            *(call.plan, call.stored_positions, self.block_size, start, call.own_position),
            self.store.groups.windows,
            call.run[0] if call.run else 0,
        )

    def hidden_capture(self, call: ScheduledCall) -> HiddenCapture | None:
        """Hidden states that workers capture of a call, if somebody needs some."""
        encoding, hidden = call.encoding, self.store.hidden
        key = hidden.find(encoding) if hidden else None
        if key is None:
            return None
        return HiddenCapture(key, encoding.hidden_layers, call.own_position)

    # -- the end ---------------------------------------------------------------------------

    def close(self, call: ScheduledCall, failure: str | None) -> None:
        """Remove a call whose request ended; `failure` says why it made no message, or None."""
        del self.calls[call.id]
        self.waiting.pop(call.id, None)
        self.parking.leave(call)
        self._num_events += not call.is_internal
        self._leave_helpers(call)
        self.store.residency.leave(call.reads, reading=call.is_scheduled)
        for parent in call.parents:
            self.store.settle(parent)
        encoding = call.encoding
        self.store.residency.remove_encoder(encoding, call.id)
        if encoding.unwritten and not encoding.encoders:
            # Whoever wants the patch later lays it over its source anew, which may be evicted now.
            self.store.residency.drop(encoding)
        if failure and not call.is_internal and not encoding.is_resident:
            self.store.fail(call.message, failure)
        self.store.settle(encoding)

    def _leave_helpers(self, call: ScheduledCall) -> None:
        """Pass what is encoded for a call that ends on to another call that waits for it."""
        if call.serves is not None:
            call.serves.helpers.discard(call)
        for helper in list(call.helpers):
            heir = self.waiting_for(helper.encoding)
            if heir is not None:
                helper.serve(heir)
            else:
                self.unneeded.append(helper)

    def waiting_for(self, encoding: Encoding) -> ScheduledCall | None:
        """First call that waits for an encoding as one of its parents, or None."""
        found = (c for c in self.waiting.values() if encoding in c.parents)
        return min(found, key=lambda c: c.turn, default=None) if encoding.num_waiting else None

    def readers_of(self, encoding: Encoding) -> list[ScheduledCall]:
        """Calls that wait for an encoding, or for what is encoded with it; internal ones, too."""
        found: dict[ScheduledCall, None] = {}
        frontier = [encoding]
        while frontier:
            lost = frontier.pop()
            for call in self.waiting.values():
                sources = (p.patch.source for p in call.parents if p.patch)
                if call not in found and lost in (*call.parents, *sources):
                    found[call] = None
                    frontier += [call.encoding] if call.is_internal else []
        return list(found)

    def finish_decode(self, call: ScheduledCall, blocks: Blocks) -> None:
        """Make a message of the header and all sampled tokens of a call that has generated.

        The last token has been sampled but not run, and with asynchronous scheduling no more
        than that is certain. A request that ended while it was preempted holds no blocks: its
        message is known, and is encoded when it is read.
        """
        assert call.plan is not None
        request, base, encoding = call.request, call.plan.base, call.encoding
        encoding.token_ids = list(request.all_token_ids[base:])
        if call.params and call.params.open_end:
            call.message.open_report = report_of(call)
            self.store.fail_if_lost(call.message)
        else:
            self.store.mark_final(encoding)
        if not call.is_scheduled:
            return
        num_encoded = min(request.num_computed_tokens, request.num_tokens - 1) - base
        if self.has_run_all(call):
            num_encoded = encoding.num_tokens
        self.store.hold(encoding, self.blocks.own_part(call, blocks), num_encoded)
        if encoding.is_resident:
            self.store.hold_state(encoding, call.id)

    def has_run_all(self, call: ScheduledCall) -> bool:
        """Return whether a request that has generated has run its last token, too, and no more.

        With asynchronous scheduling that is in the step that was planned before the token was
        known. Then its state is the one behind that token, and must not be changed by it again.
        """
        num_run, num_tokens = call.request.num_computed_tokens, call.request.num_tokens
        return self.store.states is not None and num_run == num_tokens

    def lacks_last_token(self, call: ScheduledCall) -> bool:
        """Return whether the last token alone is missing of what a call has generated.

        With states, a request that has run further than that cannot be turned back: its message is
        encoded anew when a call is to begin behind it.
        """
        num_run, num_tokens = call.request.num_computed_tokens, call.request.num_tokens
        return self.store.states is None or num_run == num_tokens - 1
