# SPDX-License-Identifier: Apache-2.0
"""Guarantee of progress: no call waits for ever for room that others take from it in turn."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall

logger = init_logger("vllm.choreo.scheduler")

# Calls that wait for long contexts to be encoded again may need as many, and lose little by it.
MAX_STALLED_STEPS = 200


class ProgressGuard:
    """Guard that serves one call alone if no request of a client gets on.

    Calls for which there is too little room may take it from one another in turn: what one evicts
    another has encoded again, which has the first one preempted. If no request has come farther
    than ever before for `MAX_STALLED_STEPS` steps that were not idle, the first call in turn is
    served alone until it has ended: nothing is encoded for others, and none of them starts. So
    every call is answered, however the choices before it were made.

    Attributes:
        alone: the call that is served alone; None: all are served.
        num_alone: number of calls that were, this one included.
    """

    def __init__(self, call_table: CallTable) -> None:
        self._call_table = call_table
        self._farthest: dict[str, int] = {}
        self._num_stalled_steps = 0
        self.alone: ScheduledCall | None = None
        self.num_alone = 0

    def begin_step(self) -> None:
        """Choose the call that is served alone in the step that is planned next, if it must be."""
        if self.alone is not None and self.alone.id not in self._call_table.calls:
            self.alone, self._num_stalled_steps = None, 0
        waiting = self._call_table.waiting.values()
        if self.alone is None and self._num_stalled_steps >= MAX_STALLED_STEPS and waiting:
            self.alone = min(waiting, key=lambda call: call.turn).beneficiary
            self.num_alone += 1
            logger.warning(
                "calls take the KV cache from one another; %s is served alone until it ends. More "
                "KV cache, or fewer calls at a time, would be faster",
                self.alone.id,
            )

    def may_start(self, call: ScheduledCall) -> bool:
        """Return whether a call may start, or go on, and have something encoded for it."""
        return self.alone is None or call.beneficiary is self.alone or call.is_scheduled

    def end_step(self, scheduled: Iterable[Request], is_idle: bool) -> None:
        """Note how far requests have come.

        Args:
            scheduled: clients' requests that run in the step that was planned.
            is_idle: whether nothing runs in it, and nothing was begun.
        """
        has_progress = False
        for request in scheduled:
            if request.num_computed_tokens > self._farthest.get(request.request_id, 0):
                self._farthest[request.request_id] = request.num_computed_tokens
                has_progress = True
        if is_idle:  # whatever is waited for, it is not room that another call takes
            self.alone = None
        self._num_stalled_steps = 0 if has_progress or is_idle else self._num_stalled_steps + 1

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._farthest.pop(request_id, None)
