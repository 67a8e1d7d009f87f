# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, in which requests may be choreographed calls.

This module says when something happens; `admission`, `block_reserver`, `finalizer`, `refusals`,
`progress_guard` and `operations` say what, and `call_table` has the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.kv_cache import block_bytes, num_kinds
from vllm_choreo.engine.scheduler.adapters import Adapters
from vllm_choreo.engine.scheduler.admission import Admission
from vllm_choreo.engine.scheduler.block_manager import ChoreoKVCacheManager
from vllm_choreo.engine.scheduler.block_reserver import BlockReserver
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.connectors import OrdinaryRequestsOnly, keep_calls_out
from vllm_choreo.engine.scheduler.finalizer import Finalizer
from vllm_choreo.engine.scheduler.internal import InternalRequests
from vllm_choreo.engine.scheduler.key_mover import KeyMover
from vllm_choreo.engine.scheduler.operations import Operations
from vllm_choreo.engine.scheduler.patcher import Patcher
from vllm_choreo.engine.scheduler.prefix_states import PrefixStates
from vllm_choreo.engine.scheduler.progress_guard import ProgressGuard
from vllm_choreo.engine.scheduler.refusals import Refusals
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.engine.scheduler.snapshot_server import SnapshotServer
from vllm_choreo.engine.scheduler.snapshot_server import operations as snapshot_operations
from vllm_choreo.engine.scheduler.store_maker import StoreMaker
from vllm_choreo.engine.scheduler.window_manager import keep_windows_of_calls
from vllm_choreo.engine.step import (
    ChoreoStep,
    HiddenCapture,
    add_step,
    attention_of,
)
from vllm_choreo.errors import ChoreoError
from vllm_choreo.kv_dtype import is_quantized
from vllm_choreo.store.stats import MemorySizes

# Ten seconds at least in an engine core's process: vLLM sleeps 1 ms after an idle step there.
_MAX_IDLE_STEPS = 10_000


class _Choreographed(Scheduler):
    """Mixin of both schedulers, before vLLM's class and delegating to it."""

    # Of the class, for a scheduler that is made without its constructor: it has no calls.
    internal = InternalRequests()
    refusals = Refusals("no KV cache")
    prefix_states: PrefixStates | None = None
    has_preempted = False  # in the step being planned
    num_idle_steps = 0  # for which calls have waited for a save, a load, or nothing at all

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choreo_config = ChoreoConfig.from_vllm(self.vllm_config)
        manager = self.kv_cache_manager
        self.store = StoreMaker(
            self.vllm_config, self.choreo_config, self.kv_cache_config, self.block_size
        ).make(manager.block_pool)
        min_run_tokens = 1 if self.vllm_config.speculative_config is None else 2
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        self.call_table = CallTable(
            self.store,
            self.max_model_len,
            min_run_tokens,
            self._reprioritize if by_priority else None,
        )
        self.progress_guard = ProgressGuard(self.call_table)
        in_place = self.choreo_config.reposition == "in_place"
        self.mover = KeyMover(self.call_table, manager.block_pool) if in_place else None
        # vLLM's constructor names its manager class; the subclass only adds methods.
        manager.__class__ = ChoreoKVCacheManager
        assert isinstance(manager, ChoreoKVCacheManager)
        manager.call_table, manager.mover = self.call_table, self.mover
        manager.prefix_states = self.prefix_states = self._prefix_states()
        if self.prefix_states is not None:
            # vLLM asks where steps of prompts are to end: see the method of that name.
            self.need_mamba_block_aligned_split = manager.enable_caching
        keep_windows_of_calls(manager.coordinator.single_type_managers, self.call_table)
        self._make_parts(manager)
        manager.drop_idle = self.operations.drop_idle
        manager.runs_alone = lambda request: self.running == [request]
        if self.connector is not None:
            keep_calls_out(self.connector, self.call_table.calls.__contains__)

    def _make_parts(self, manager: ChoreoKVCacheManager) -> None:
        self.adapters = adapters = Adapters()
        pool = manager.block_pool
        room = f"the KV cache of {pool.num_gpu_blocks} blocks of {self.block_size} tokens"
        if self.store.states is not None:
            setting = "additional_config.choreo.tokens_per_state"
            room += f" and {self.store.states.num_states} states ({setting})"
        self.refusals = Refusals(room)
        kinds = num_kinds(self.kv_cache_config, self.choreo_config.window_groups)
        self.admission = Admission(self.call_table, adapters, self.vllm_config, kinds)
        shared = (self.refusals, adapters, self.internal)
        self.patcher = Patcher(self.call_table, pool)
        self.reserver = BlockReserver(
            self.call_table,
            pool,
            *shared,
            self.patcher,
            may_start=self.progress_guard.may_start,
            enqueue=self._enqueue_before,
            enqueue_woken=self._enqueue_by_arrival,
            finish=self.finish_requests,
            running=lambda: self.running,
        )
        self.finalizer = Finalizer(self.call_table, manager, *shared, enqueue=super().add_request)
        self.snapshots = SnapshotServer(
            self.store,
            pool,
            adapters,
            self.max_model_len,
            self.vllm_config.lora_config,
            self.admission.picture_rules,
            self._may_write_free_blocks,
            can_turn_keys=not is_quantized(self.vllm_config),
        )
        self.operations = Operations(
            self.call_table,
            pool,
            snapshots=snapshot_operations(self.snapshots),
            max_pinned_blocks=self._num_blocks(self.choreo_config.pinned_share),
            sizes=MemorySizes(block_bytes(self.kv_cache_config), 0),
            pending_last_tokens=self._pending_last_tokens,
            finish=self.finish_requests,
        )

    def _prefix_states(self) -> PrefixStates | None:
        if self.store.states is None:
            return None
        pool = self.store.states.pool
        assert isinstance(pool, BlockPool)
        return PrefixStates(self.call_table, pool, self.choreo_config.tokens_per_state)

    def _num_blocks(self, share: float) -> int:
        """A part of the KV cache, in blocks."""
        return int(share * self.kv_cache_manager.block_pool.num_gpu_blocks)

    # -- arrival ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        try:
            self.admission.admit(request)
        except ChoreoError as error:
            self.refusals.refuse(request.request_id, error)
        except Exception as error:
            self.refusals.refuse_unexpected(request.request_id, error)
        super().add_request(request)

    def _enqueue_before(self, request: Request, other: Request) -> None:
        super().add_request(request)
        queue = self.waiting
        if isinstance(queue, deque):  # first come, first served; else sorted by arrival
            queue.remove(request)
            queue.insert(queue.index(other), request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        if not self.call_table.is_parked(request.request_id):
            super()._enqueue_waiting_request(request)

    def _enqueue_by_arrival(self, request: Request) -> None:
        super()._enqueue_waiting_request(request)
        queue = self.waiting
        if isinstance(queue, deque):
            queue.pop()  # vLLM has put it last
            index = len(queue)
            while index and queue[index - 1].arrival_time > request.arrival_time:
                index -= 1
            queue.insert(index, request)

    def _reprioritize(self, requests: Collection[Request], priority: int) -> None:
        queued = set(requests).intersection(self.waiting)
        self.waiting.remove_requests(queued)
        for request in requests:
            request.priority = priority
        for request in queued:
            self.waiting.add_request(request)

    def get_num_unfinished_requests(self) -> int:
        """Extend vLLM's method by the woken calls; parked ones need no step."""
        is_paused = self._pause_state != PauseState.UNPAUSED
        return super().get_num_unfinished_requests() + (
            not is_paused and len(self.call_table.woken)
        )

    def has_finished_requests(self) -> bool:
        """Extend vLLM's method, which takes a parked call for one that a connector still holds."""
        if self.connector is None or self.finished_req_ids:
            return super().has_finished_requests()
        num_queued = sum(self.get_request_counts()) + len(self.call_table.parking)
        return len(self.requests) > num_queued + len(self.call_table.woken)

    # -- a step ----------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.store.begin_step()
        self.has_preempted = False
        self.progress_guard.begin_step()
        if self.choreo_config.tenant_share < 1 and self.progress_guard.alone is None:
            self.store.enforce_share(self._num_blocks(self.choreo_config.tenant_share))
        self.reserver.prepare_waiting()
        if self.prefix_states is not None:
            self.prefix_states.begin_step()
        output = super().schedule(*args, **kwargs)
        if self.connector is None:
            add_step(output, self._choreo_step(output))
        if self.call_table.calls:
            self._note_progress(output)
        if not output.num_scheduled_tokens and self.call_table.calls and not self._can_progress():
            self._refuse_what_never_fits()
        else:
            self.num_idle_steps = 0
        return output

    def _note_progress(self, output: SchedulerOutput) -> None:
        scheduled = (self.requests[request_id] for request_id in output.num_scheduled_tokens)
        is_busy = output.num_scheduled_tokens or self.reserver.has_begun or self.has_preempted
        self.progress_guard.end_step(
            (request for request in scheduled if not self.internal.includes(request)), not is_busy
        )

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Extend vLLM's method: a connector is told which blocks a step writes."""
        add_step(scheduler_output, self._choreo_step(scheduler_output))
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _may_write_free_blocks(self) -> bool:
        """Return whether a KV connector is done with the blocks of requests that have ended.

        It copies the last ones of a request out after the step that tells of its end.
        """
        connector = self.connector
        return connector is None or not (self.finished_req_ids or connector.has_pending_push_work())

    def _choreo_step(self, output: SchedulerOutput) -> ChoreoStep:
        started = [req.req_id for req in output.scheduled_new_reqs]
        started += output.scheduled_cached_reqs.resumed_req_ids
        calls = self.call_table.calls
        spans = {r: self.call_table.spans(calls[r]) for r in started if r in calls}
        if self.mover is not None:
            self.mover.withdraw_all()
        copies = self.store.take_block_copies()
        moves = [*copies.moves, *(self.mover.take_moves() if self.mover else ())]
        hidden, stages = self.store.hidden, self.patcher.stager.take()
        step = ChoreoStep(
            spans,
            tuple(moves),
            copies.saves,
            copies.loads,
            stages,
            self._captures(calls[r] for r in spans),
            hidden.take_forgotten() if hidden else (),
            self.adapters.take_reloads(),
        )
        return self._with_states(step, started)

    def _with_states(self, step: ChoreoStep, started: Iterable[str]) -> ChoreoStep:
        """Add the states of requests that start or go on with others, and what these begin with."""
        states = self.store.states
        if states is None:
            return step
        changed = [*started, *states.take_gone_on()]
        found = {request_id: states.find(request_id) for request_id in changed}
        copies = states.copies.take()
        return replace(
            step,
            states={request_id: state.block_id for request_id, state in found.items() if state},
            state_saves=copies.saves,
            state_loads=copies.loads,
            state_starts=states.starts.take(),
        )

    def _captures(self, started: Iterable[ScheduledCall]) -> dict[str, HiddenCapture]:
        captures = {call.id: self.call_table.hidden_capture(call) for call in started}
        return {call_id: capture for call_id, capture in captures.items() if capture}

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self.refusals:
            return False
        call = self.call_table.calls.get(request.request_id)
        may_start = self.progress_guard.may_start
        if call is not None and not (self.call_table.is_ready(call) and may_start(call)):
            return False
        return super()._handle_blocked_waiting_request(request)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Extend vLLM's method: where we keep the states, they are left in other places."""
        found = num_new_local_computed_tokens, num_external_computed_tokens
        # vLLM's tests call it with what is no scheduler: hence no super(), and the default.
        prefix_states: PrefixStates | None = getattr(self, "prefix_states", None)
        if prefix_states is None:
            return Scheduler._mamba_block_aligned_split(self, request, num_new_tokens, *found)
        if request.request_id in self.call_table.calls:
            return num_new_tokens
        start = request.num_computed_tokens + sum(found)
        return prefix_states.end_of_chunk(request, start, start + num_new_tokens) - start

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.has_preempted = True
        call = self.call_table.calls.get(request.request_id)
        if call is not None:
            self.call_table.on_preempted(call)

    def _can_progress(self) -> bool:
        """Return whether a later step may find more room than the one just planned, which is empty.

        If not, the first call that found too little will never fit.
        """
        return bool(
            self.running
            or self._pause_state != PauseState.UNPAUSED
            or self.refusals
            or self.has_preempted  # vLLM starts nothing in such a step
            or self.reserver.has_begun
            or self.deferred_frees
            or self._waits_for_connector()
            # What was preempted comes back when its last step has been processed.
            or any(request.num_in_flight_tokens for request in self.waiting)
        )

    def _waits_for_connector(self) -> bool:
        """Return whether requests hold blocks until a KV connector has filled or sent them."""
        return self.connector is not None and (
            self.has_finished_requests()
            or any(
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                for request in self.kv_holding_waiting
            )
        )

    def _refuse_what_never_fits(self) -> None:
        if pending_last_tokens := self._pending_last_tokens():
            # They hold blocks and got none: ended; the messages are encoded again when read.
            self.finish_requests(
                [call.id for call in pending_last_tokens], RequestStatus.FINISHED_ABORTED
            )
            return
        if self.snapshots.is_holding:
            # It lets go as soon as its bytes are read or written. A save whose client has gone
            # would be waited for, for ever.
            self.num_idle_steps += 1
            if self.num_idle_steps < _MAX_IDLE_STEPS or self.snapshots.revoke():
                return
        # One that waits for its grammar has not been tried yet.
        self.reserver.refuse_too_large(
            self.waiting, lambda status: not self._is_blocked_waiting_status(status)
        )
        if not self.refusals:
            self._refuse_what_waits_for_nothing()

    def _refuse_what_waits_for_nothing(self) -> None:
        """Refuse the first call in turn if, step after step, none gets on and none lacks room."""
        if any(self._is_blocked_waiting_status(request.status) for request in self.waiting):
            return
        self.num_idle_steps += 1
        waiting = self.call_table.turns.in_order()
        if self.num_idle_steps >= _MAX_IDLE_STEPS and waiting:
            error = RuntimeError("calls wait, and nothing is left that could be begun for them")
            self.refusals.refuse_unexpected(waiting[0].beneficiary.id, error)

    def _keep_header_logprobs(self, logprobs_by_request: dict[str, LogprobsTensors | None]) -> None:
        """Cut the prompt's log-probabilities of calls to those of the header, in place.

        Workers have rows for the whole virtual sequence, and fill those of tokens that they run.
        """
        for request_id, logprobs in logprobs_by_request.items():
            call = self.call_table.calls.get(request_id)
            if call is not None and logprobs is not None:
                # Its first token follows the parents, which are not run.
                first = len(logprobs.logprobs) - (call.num_header_tokens - 1)
                logprobs_by_request[request_id] = LogprobsTensors(
                    logprobs.logprob_token_ids[first:],
                    logprobs.logprobs[first:],
                    logprobs.selected_token_ranks[first:],
                )

    def _count_drafts(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Count the drafted tokens of calls, and those that were right."""
        if not step.scheduled_spec_decode_tokens:
            return
        invalid = step.num_invalid_spec_tokens or {}
        # vLLM pads requests that begin with one token. What it drafted for others only workers may
        # know.
        padded = {started.req_id for started in step.scheduled_new_reqs}
        padded |= step.scheduled_cached_reqs.resumed_req_ids
        for request_id, drafted in step.scheduled_spec_decode_tokens.items():
            is_drafted = request_id in self.call_table.calls and request_id not in padded
            if is_drafted and output.sampled_token_ids:
                sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
                self.store.totals["drafted_tokens"] += len(drafted) - invalid.get(request_id, 0)
                self.store.totals["accepted_draft_tokens"] += max(len(sampled) - 1, 0)

    # -- the end of a request --------------------------------------------------------------

    def _free_request(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        call = self.call_table.calls.get(request.request_id)
        report = self.finalizer.finalize(call) if call is not None else None
        self.progress_guard.forget(request.request_id)
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        return ({**(kv_params or {}), **report} if report else kv_params), ec_params

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Extend vLLM's method: no connector holds the blocks of calls."""
        connector = self.connector
        if isinstance(connector, OrdinaryRequestsOnly) and request.request_id in connector.call_ids:
            return False, None
        return super()._connector_finished(request)

    def _pending_last_tokens(self) -> list[ScheduledCall]:
        """Calls that encode the last token of an answer, and wait for their step."""
        calls = self.call_table.calls
        return [calls[r.request_id] for r in self.kv_holding_waiting if self.internal.includes(r)]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if attention := attention_of(model_runner_output):
            self.call_table.on_attention(attention)
        self._count_drafts(scheduler_output, model_runner_output)
        self._keep_header_logprobs(model_runner_output.prompt_logprobs_dict)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for per_client in outputs.values():
            per_client.outputs = [
                output for output in per_client.outputs if not self.internal.includes(output)
            ]
        if self.refusals:
            self.refusals.answer(outputs, self.finish_requests)
            self.reserver.end_unneeded()
        return outputs


class ChoreoScheduler(_Choreographed, Scheduler):
    """Scheduler of engines without asynchronous scheduling."""


class ChoreoAsyncScheduler(_Choreographed, AsyncScheduler):
    """Scheduler of engines with asynchronous scheduling."""
