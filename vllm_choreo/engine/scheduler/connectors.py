# SPDX-License-Identifier: Apache-2.0
"""KV connectors beside calls: ordinary requests keep them, and calls are unknown to them.

A connector stores and loads keys and values under hashes of prefixes, which messages do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from vllm_choreo.engine.step import step_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

_Value = TypeVar("_Value")


class OrdinaryRequestsOnly(KVConnectorBase_V1):
    """Mixin of connectors in the scheduler, before vLLM's class: calls never reach that.

    Attributes:
        is_call: returns whether the request of an id is a call, or one of ours.
        call_ids: ids of calls, until the step that tells of their end.
    """

    is_call: Callable[[str], bool]
    call_ids: set[str]

    def leave_out(self, is_call: Callable[[str], bool]) -> None:
        """Begin to leave out the requests for which `is_call` returns True."""
        self.is_call, self.call_ids = is_call, set()

    def on_new_request(self, request: Request) -> None:
        if self.is_call(request.request_id):
            self.call_ids.add(request.request_id)
        else:
            super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id in self.call_ids:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if request.request_id not in self.call_ids:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        shown = _without_calls(scheduler_output, self.call_ids)
        metadata = super().build_connector_meta(shown)
        # The one part of a step that connectors may change.
        scheduler_output.new_block_ids_to_zero = shown.new_block_ids_to_zero
        self.call_ids -= scheduler_output.finished_req_ids
        return metadata


def keep_calls_out(connector: KVConnectorBase_V1, is_call: Callable[[str], bool]) -> None:
    """Have a connector of the scheduler see ordinary requests alone.

    Args:
        connector: its class becomes a subclass that only leaves calls out.
        is_call: returns whether the request of an id is a call, or one of ours.
    """
    parent = type(connector)
    connector.__class__ = type(parent.__name__, (OrdinaryRequestsOnly, parent), {})
    OrdinaryRequestsOnly.leave_out(cast(OrdinaryRequestsOnly, connector), is_call)


def _without_calls(output: SchedulerOutput, call_ids: set[str]) -> SchedulerOutput:
    """Copy a step without its calls; the blocks that it writes for them are told as copied.

    A connector may still be reading blocks of requests that have ended: it looks for them among
    those that a step gives away or writes over.
    """
    step = step_of(output)
    assert step is not None, "it is added before connectors are told"
    written = {*_call_blocks(output, call_ids), *step.written_blocks()}
    copies = [KVCacheBlockCopy(block, block) for block in sorted(written)]
    scheduled = _without(output.num_scheduled_tokens, call_ids)
    state = output.kv_connector_block_state
    return replace(
        output,
        scheduled_new_reqs=[r for r in output.scheduled_new_reqs if r.req_id not in call_ids],
        scheduled_cached_reqs=_cached_without(output.scheduled_cached_reqs, call_ids),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=_without(output.scheduled_spec_decode_tokens, call_ids),
        finished_req_ids=output.finished_req_ids - call_ids,
        preempted_req_ids=(output.preempted_req_ids or set()) - call_ids,
        kv_cache_block_copies=[*(output.kv_cache_block_copies or ()), *copies] or None,
        kv_connector_block_state=state and replace(state, req_ids=state.req_ids - call_ids),
    )


def _without(by_request: dict[str, _Value], call_ids: set[str]) -> dict[str, _Value]:
    return {r: value for r, value in by_request.items() if r not in call_ids}


def _cached_without(cached: CachedRequestData, call_ids: set[str]) -> CachedRequestData:
    rows = [row for row, r in enumerate(cached.req_ids) if r not in call_ids]

    def chosen(column: list[_Value]) -> list[_Value]:
        return [column[row] for row in rows] if column else []

    return replace(
        cached,
        req_ids=chosen(cached.req_ids),
        resumed_req_ids=cached.resumed_req_ids - call_ids,
        new_token_ids=chosen(cached.new_token_ids),
        all_token_ids=_without(cached.all_token_ids, call_ids),
        new_block_ids=chosen(cached.new_block_ids),
        num_computed_tokens=chosen(cached.num_computed_tokens),
        num_output_tokens=chosen(cached.num_output_tokens),
    )


def _call_blocks(output: SchedulerOutput, call_ids: set[str]) -> Iterator[int]:
    """Blocks that calls get in a step, those of their parents among them."""
    cached = output.scheduled_cached_reqs
    given: Iterable[tuple[str, tuple[list[int], ...] | None]] = (
        *((new.req_id, new.block_ids) for new in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.new_block_ids, strict=True),
    )
    for request_id, groups in given:
        if request_id in call_ids:
            yield from (block for group in groups or () for block in group)
