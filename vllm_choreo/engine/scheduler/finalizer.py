# SPDX-License-Identifier: Apache-2.0
"""The end of a call: its blocks become its message, and the last token gets a key and a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_choreo.engine.scheduler.adapters import Adapters
from vllm_choreo.engine.scheduler.block_manager import ChoreoKVCacheManager
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.internal import InternalRequests
from vllm_choreo.engine.scheduler.refusals import Refusals
from vllm_choreo.engine.scheduler.report import report_of
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.store.groups import Blocks

_COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class Finalizer:
    """Maker of messages from finished requests.

    Args:
        enqueue: puts an internal request, which holds blocks, into vLLM's queue.
    """

    def __init__(
        self,
        call_table: CallTable,
        manager: ChoreoKVCacheManager,
        refusals: Refusals,
        adapters: Adapters,
        internal: InternalRequests,
        *,
        enqueue: Callable[[Request], None],
    ) -> None:
        self._call_table = call_table
        self._manager = manager
        self._refusals = refusals
        self._adapters = adapters
        self._internal = internal
        self._enqueue = enqueue

    def finalize(self, call: ScheduledCall) -> dict[str, Any] | None:
        """Turn the finished request's own blocks into its message; returns the call's report."""
        request = call.request
        complete = request.status in _COMPLETE
        # A stop string is found by the client, which then aborts the request.
        stopped = request.status == RequestStatus.FINISHED_ABORTED and bool(
            request.sampling_params and request.sampling_params.stop and request.num_output_tokens
        )
        blocks = self._manager.get_blocks(call.id).blocks
        if call.is_decode and (complete or stopped):
            self._call_table.finish_decode(call, blocks)
        report, encoding, message = None, call.encoding, call.message
        if encoding.is_known and call.plan is not None and not call.is_internal:
            report = {"choreo": report_of(call)}
        failure = None if complete or stopped else f"its request ended as {request.status.name}"
        with self._call_table.passing_on(call):
            self._call_table.close(call, self._refusals.reason(call.id) or failure)
            # An open message is not known: it has no last token yet.
            is_begun = call.is_decode and encoding.is_known and encoding.num_encoded
            if is_begun and not message.freed and self._call_table.lacks_last_token(call):
                self._encode_last_token(call, blocks)
        return report

    def _encode_last_token(self, finished: ScheduledCall, blocks: Blocks) -> None:
        """Give the last sampled token its keys and values, without delaying the answer.

        A new request takes over the finished one's blocks, and has that one token left to run.
        It holds blocks while it waits, and so comes first in the next step.
        """
        encoding = finished.encoding
        if not self._adapters.is_current(encoding.adapter):
            return  # it cannot be completed; who reads it is told
        assert finished.plan is not None
        request = self._internal.make(encoding, finished.request)
        call = self._call_table.open_encode(request, encoding, None)
        has_plan = self._call_table.resolve(call)
        assert has_plan, "what has been generated was planned"
        self._call_table.take_over(call, finished)
        request.num_computed_tokens = finished.plan.base + encoding.num_encoded
        num_blocks = -(-request.num_computed_tokens // self._call_table.block_size)
        self._manager.inherit(request, [of_group[:num_blocks] for of_group in blocks])
        if self._call_table.store.states:
            self._call_table.store.states.pass_on(finished.id, request.request_id)
        self._enqueue(request)
