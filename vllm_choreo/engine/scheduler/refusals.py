# SPDX-License-Identifier: Apache-2.0
"""Refused calls: each ends with its error, and nothing else is disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.errors import ChoreoError, PoolFullError

logger = init_logger("vllm.choreo.scheduler")


class Refusals:
    """Errors of requests that are still to be ended, by request id.

    Args:
        pool: the KV cache in words, for the error of calls that do not fit into it.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._errors: dict[str, ChoreoError] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._errors

    def __bool__(self) -> bool:
        return bool(self._errors)

    def refuse(self, request_id: str, error: ChoreoError) -> None:
        """End a request with this error after the step that is being planned."""
        self._errors[request_id] = error

    def refuse_unexpected(self, call_id: str, error: Exception) -> None:
        """Refuse a call by an error of ours that is none of its own; the engine goes on.

        Raises:
            AssertionError: that was the error. What is known of blocks may be wrong, and an engine
                that goes on could answer with somebody else's.
        """
        if isinstance(error, AssertionError):
            raise error
        logger.error("a choreographed call ended by an unexpected error", exc_info=error)
        reported = ChoreoError(
            f"an unexpected error of the engine ended the call ({type(error).__name__}); others "
            "are not disturbed, and the engine's log has more: please report it",
            parameter="call",
            value=call_id,
        )
        self.refuse(call_id, reported)

    def refuse_too_large(self, call: ScheduledCall) -> None:
        """Refuse a call for which there is not enough KV cache."""
        error = PoolFullError(
            "what the call reads, and what must be encoded again for it, do not fit together "
            f"into {self._pool}; name fewer parents, or give the engine more KV cache",
            parameter="parents",
            value=[parent.message.id for parent in call.parents],
        )
        self.refuse(call.id, error)

    def reason(self, request_id: str) -> str | None:
        """Text of the error by which a request was refused; None if it was not."""
        error = self._errors.get(request_id)
        return None if error is None else str(error)

    def answer(
        self,
        outputs: dict[int, EngineCoreOutputs],
        finish: Callable[[Iterable[str], RequestStatus], Iterable[Request]],
    ) -> None:
        """End the refused requests, and put their errors among the outputs of the step.

        Args:
            outputs: the step's outputs, by client.
            finish: the scheduler's `finish_requests`.
        """
        for request in finish(list(self._errors), RequestStatus.FINISHED_ERROR):
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params={"choreo_error": self._errors[request.request_id].to_report()},
                trace_headers=request.trace_headers,
            )
            per_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            per_client.outputs = [*per_client.outputs, output]
        self._errors.clear()
