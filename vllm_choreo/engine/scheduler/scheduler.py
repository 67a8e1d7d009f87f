# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, in which requests may be choreographed calls."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.scheduler.block_manager import ChoreoKVCacheManager
from vllm_choreo.engine.scheduler.call_book import Call, CallBook
from vllm_choreo.engine.scheduler.key_mover import KeyMover
from vllm_choreo.engine.scheduler.operations import Operations
from vllm_choreo.engine.step import ChoreoStep
from vllm_choreo.engine.worker.host_blocks import num_host_blocks
from vllm_choreo.errors import ChoreoError, PoolFullError, UnsupportedOptionError
from vllm_choreo.semantics.params import EXTRA_ARGS_KEY, FLAT_PREFIX, ChoreoParams
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.store import Message, MessageStore

_COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class _Choreographed(Scheduler):
    """What both schedulers add. Mixed in before vLLM's class, and delegating to it."""

    # Requests of our own: encodings again. Random, so that no client's id looks like one.
    _internal_prefix = f"choreo-{uuid.uuid4().hex}-"
    # Of requests still to be ended. vLLM's tests call methods of schedulers that were never
    # initialised: what ordinary steps read needs a value here, which the constructor replaces.
    _errors: dict[str, ChoreoError] = {}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        self.store = MessageStore(manager.block_pool, self.block_size, self._signature())
        self.book = CallBook(self.store, self.max_model_len)
        # vLLM's constructor names its manager class; the subclass only adds methods.
        manager.__class__ = ChoreoKVCacheManager
        assert isinstance(manager, ChoreoKVCacheManager)
        manager.book = self.book
        self.choreo_config = config = ChoreoConfig.from_vllm(self.vllm_config)
        in_place = config.reposition == "in_place"
        self.mover = KeyMover(self.book, manager.block_pool) if in_place else None
        manager.mover = self.mover
        self.tier = self.store.tier = self._host_tier(config.host_memory_gib)
        self.operations = Operations(self)
        self._errors = {}
        self._num_internal = 0

    def _signature(self) -> bytes:
        """What the keys and values of all messages depend on, besides the messages."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        rotation = getattr(model.hf_text_config, "rope_parameters", None)
        parts = (model.model, model.revision, model.dtype, cache.cache_dtype, rotation)
        return repr(parts).encode()

    def _host_tier(self, host_memory_gib: float) -> HostTier | None:
        if not host_memory_gib:
            return None
        # Per worker: the specification is that of one worker's share of the heads.
        groups = self.kv_cache_config.kv_cache_groups
        block_bytes = sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups)
        return HostTier(num_host_blocks(host_memory_gib, block_bytes))

    # -- arrival ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
        try:
            if EXTRA_ARGS_KEY in extra_args:
                self._check_engine()
                self.book.open(request, ChoreoParams.from_extra_args(extra_args))
            else:
                _check_flat_keys(extra_args)
        except ChoreoError as error:
            self._errors[request.request_id] = error
        super().add_request(request)

    def _check_engine(self) -> None:
        if not self.cache_config.enable_prefix_caching:
            raise UnsupportedOptionError(
                "blocks can only be shared with prefix caching on; start the engine without "
                "enable_prefix_caching=False",
                parameter="enable_prefix_caching",
                value=False,
            )
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedOptionError(
                "choreography needs one kind of attention in all layers; this model has "
                f"{len(self.kv_cache_config.kv_cache_groups)} kinds of KV cache",
                parameter="model",
                value=self.vllm_config.model_config.model,
            )

    # -- a step ----------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.store.step += 1
        if self.choreo_config.tenant_share < 1:
            self.store.keep_to_share(self.num_blocks(self.choreo_config.tenant_share))
        self._prepare_waiting_calls()
        output = super().schedule(*args, **kwargs)
        # Travels to the workers with the rest of the step.
        output.choreo = self._choreo_step(output)
        if not output.num_scheduled_tokens:
            self._refuse_what_never_fits()
        return output

    def _choreo_step(self, output: SchedulerOutput) -> ChoreoStep:
        started = [req.req_id for req in output.scheduled_new_reqs]
        started += output.scheduled_cached_reqs.resumed_req_ids
        calls = self.book.calls
        spans = {r: self.book.spans(calls[r]) for r in started if r in calls}
        if self.mover is not None:
            self.mover.withdraw_all()
        moves = self.mover.take_moves() if self.mover else []
        saves, loads = self.tier.take_copies() if self.tier else ([], [])
        return ChoreoStep(spans, tuple(moves), tuple(saves), tuple(loads))

    def _prepare_waiting_calls(self) -> None:
        """Resolve calls whose parents are known now; have evicted parents encoded again.

        The oldest call that is not ready always gets what it needs; younger ones only what fits
        beside, or calls would evict one another's parents in turn.
        """
        room: int | None = None
        waiting = [call for call in self.book.calls.values() if not call.admitted]
        for call in waiting:  # grows while calls that encode again are entered
            if not self._resolve(call) or self.book.is_ready(call):
                continue
            is_oldest = room is None or call.serves is not None
            if room is None:
                room = self._room_for_encoding()
            for message in self.book.missing(call):
                if self._restore(message, call):
                    continue
                need = -(-message.num_tokens // self.block_size)
                if is_oldest or need <= room:
                    room -= need
                    waiting.append(self._encode_again(message, call))
                    call.beneficiary.num_served += is_oldest
            if self.book.runs_in_circles(call.beneficiary):
                self._refuse_too_large(call.beneficiary)

    def _resolve(self, call: Call) -> bool:
        """`CallBook.resolve`, with what it raises noted as the request's end."""
        if call.request.request_id in self._errors:
            return False
        try:
            return self.book.resolve(call)
        except ChoreoError as error:
            self._errors[call.request.request_id] = error
            return False

    def _restore(self, message: Message, reader: Call) -> bool:
        """Bring a message back from host memory, if it lies there and there is room for it."""
        if self.tier is None or message not in self.tier:
            return False
        self.tier.keep(message)  # the messages that make room for it are saved there
        pool = self.kv_cache_manager.block_pool
        need = self.tier.num_blocks_of(message)
        while pool.get_num_free_blocks() < need:
            if not self.store.evict_one(reader.needed(), waiting_too=False):
                return False
        blocks = pool.get_new_blocks(need)
        self.store.restore(message, blocks)
        pool.free_blocks(blocks)  # the store holds its own references
        return True

    def num_blocks(self, share: float) -> int:
        """A part of the KV cache, in blocks."""
        return int(share * self.kv_cache_manager.block_pool.num_gpu_blocks)

    def _room_for_encoding(self) -> int:
        """Blocks that are free, or would be if idle messages were evicted, and not spoken for."""
        idle = sum(len(m.blocks) for m in self.store.holding() if not m.in_use)
        planned = sum(
            -(-call.message.num_tokens // self.block_size)
            for call in self.book.calls.values()
            if call.is_internal and not call.admitted
        )
        return self.kv_cache_manager.block_pool.get_num_free_blocks() + idle - planned

    def _encode_again(self, message: Message, serves: Call) -> Call:
        """Queue a request that encodes what `message` lacks, right before the call it serves."""
        self.store.totals["encoded_again_messages"] += 1
        self.store.totals["encoded_again_tokens"] += message.num_tokens - message.num_encoded
        request = self._internal_request(message, serves.request)
        call = self.book.open_encode(request, message, serves)
        super().add_request(request)
        queue: Any = self.waiting
        if isinstance(queue, deque):  # first come, first served; else sorted by arrival
            queue.remove(request)
            queue.insert(queue.index(serves.request), request)
        return call

    def _internal_request(self, message: Message, like: Request) -> Request:
        """A request of our own over the tokens of a message; vLLM samples a token, we drop it."""
        self._num_internal += 1
        return Request(
            request_id=f"{self._internal_prefix}{self._num_internal}",
            prompt_token_ids=list(message.token_ids or ()),
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            lora_request=message.adapter,
            arrival_time=like.arrival_time,
            priority=like.priority,
        )

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self._errors:
            return False
        call = self.book.calls.get(request.request_id)
        if call is not None and not self.book.is_ready(call):
            return False
        return super()._handle_blocked_waiting_request(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        call = self.book.calls.get(request.request_id)
        if call is not None:
            self.book.preempted(call)

    def _refuse_what_never_fits(self) -> None:
        """Nothing runs and nothing could be started: the first ready call is too large."""
        if self.running or self._errors or not self.book.calls:
            return
        if unsealed := self.unsealed():
            # They hold blocks and got none: let go; the messages are encoded again when read.
            request_ids = [call.request.request_id for call in unsealed]
            self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
            return
        for request in self.waiting:
            call = self.book.calls.get(request.request_id)
            # One that waits for its grammar has not been tried yet.
            is_tried = not self._is_blocked_waiting_status(request.status)
            if call is not None and self.book.is_ready(call) and is_tried:
                self._refuse_too_large(call.beneficiary)
                return

    def unsealed(self) -> list[Call]:
        """Seals whose step has not been planned yet."""
        calls = self.book.calls
        return [calls[r.request_id] for r in self.kv_holding_waiting if self._is_internal(r)]

    def _is_internal(self, item: Request | EngineCoreOutput) -> bool:
        return item.request_id.startswith(self._internal_prefix)

    def _refuse_too_large(self, call: Call) -> None:
        self._errors[call.request.request_id] = PoolFullError(
            "what the call reads, and what must be encoded again for it, do not fit together "
            f"into the KV cache of {self.cache_config.num_gpu_blocks} blocks of "
            f"{self.block_size} tokens; name fewer parents, or give the engine more KV cache",
            parameter="parents",
            value=[parent.id for parent in call.parents],
        )

    # -- the end of a request --------------------------------------------------------------

    def _free_request(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        call = self.book.calls.get(request.request_id)
        report = self._close_call(call) if call is not None else None
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        return ({**(kv_params or {}), **report} if report else kv_params), ec_params

    def _close_call(self, call: Call) -> dict[str, Any] | None:
        """Turn the finished request's own blocks into its message."""
        request = call.request
        complete = request.status in _COMPLETE
        # A stop string is found by the client, which then aborts the request.
        stopped = request.status == RequestStatus.FINISHED_ABORTED and bool(
            request.sampling_params and request.sampling_params.stop and request.num_output_tokens
        )
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        if call.is_decode and (complete or stopped):
            self.book.finish_decode(call, blocks)
        report = None
        if call.message.is_known and call.plan is not None and not call.is_internal:
            report = {"choreo": self.book.report(call)}
        failure = None if complete or stopped else f"its request ended as {request.status.name}"
        error = self._errors.get(request.request_id)
        self.book.close(call, str(error) if error else failure)
        message = call.message
        # An open message has no last token yet.
        if call.is_decode and message.is_known and message.num_encoded and not message.freed:
            self._seal(call, blocks)
        return report

    def _seal(self, finished: Call, blocks: Sequence[KVCacheBlock]) -> None:
        """Give the last sampled token its keys and values, without delaying the answer.

        A new request takes over the finished one's blocks, and has that one token left to run.
        It holds blocks while it waits, and so comes first in the next step.
        """
        assert finished.plan is not None
        message, manager = finished.message, self.kv_cache_manager
        request = self._internal_request(message, finished.request)
        call = self.book.open_encode(request, message, None)
        self.book.resolve(call)
        self.book.take_over(call, finished)
        request.num_computed_tokens = finished.plan.base + message.num_encoded
        assert isinstance(manager, ChoreoKVCacheManager)
        manager.inherit(request, blocks[: -(-request.num_computed_tokens // self.block_size)])
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for per_client in outputs.values():
            per_client.outputs = [
                output for output in per_client.outputs if not self._is_internal(output)
            ]
        self._end_refused(outputs)
        return outputs

    def _end_refused(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Answer refused requests with their error; nothing else is disturbed."""
        if not self._errors:
            return
        ended = self.finish_requests(list(self._errors), RequestStatus.FINISHED_ERROR)
        for request in ended:
            error = self._errors[request.request_id]
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params={"choreo_error": error.to_report()},
                trace_headers=request.trace_headers,
            )
            per_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            per_client.outputs = [*per_client.outputs, output]
        self._errors.clear()


def _check_flat_keys(extra_args: Iterable[str]) -> None:
    """
    Raises:
        UnsupportedOptionError: the front end did not read what is meant for us.
    """
    for key in extra_args:
        if key.startswith(FLAT_PREFIX):
            raise UnsupportedOptionError(
                "these keys are for /v1/completions and /v1/chat/completions of a server that was "
                f'started with --plugin choreo; elsewhere use extra_args["{EXTRA_ARGS_KEY}"]',
                parameter=key,
                value="given",
            )


class ChoreoScheduler(_Choreographed, Scheduler):
    """For engines without asynchronous scheduling."""


class ChoreoAsyncScheduler(_Choreographed, AsyncScheduler):
    """For engines with asynchronous scheduling."""
