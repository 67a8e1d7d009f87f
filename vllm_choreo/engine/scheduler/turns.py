# SPDX-License-Identifier: Apache-2.0
"""Turns of calls: in which order they get room, by priority where that is vLLM's policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vllm.v1.request import Request, RequestStatus

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall


class Turns:
    """Order of calls, and of ordinary requests among them.

    Args:
        calls: calls in flight, by request id.
        waiting: those of them that wait for room, likewise.
        reprioritize: gives requests another priority in vLLM's queue; None: vLLM starts them as
            they come.
    """

    def __init__(
        self,
        calls: Mapping[str, ScheduledCall],
        waiting: Mapping[str, ScheduledCall],
        reprioritize: Callable[[Collection[Request], int], None] | None,
    ) -> None:
        self._calls, self._waiting = calls, waiting
        self._reprioritize = reprioritize
        self._num_opened = 0

    def give(self, call: ScheduledCall) -> None:
        """Give a new call its turn, behind those before it; one that serves has that of another."""
        self._num_opened += 1
        if call.serves is None:
            call.own_turn = (self._priority(call.request), self._num_opened)
            self._pass_priority_on(call)

    def _priority(self, request: Request) -> int:
        return 0 if self._reprioritize is None else request.priority

    def _pass_priority_on(self, call: ScheduledCall) -> None:
        """Give the calls that a new one waits for its priority, if theirs comes after it.

        Else those that come between are served before what it waits for, and each may wait for room
        that the other has: priority inversion.
        """
        priority, readers, urgent = call.own_turn[0], [call], list[Request]()
        while readers:
            for parent in readers.pop().parents:
                for made_by in filter(None, map(self._calls.get, parent.encoders)):
                    if made_by.own_turn[0] <= priority or made_by.is_internal:
                        continue  # what is encoded again is adopted by the first that waits for it
                    made_by.own_turn = (priority, made_by.own_turn[1])
                    urgent += (other.request for other in made_by.with_helpers())
                    readers.append(made_by)
        if urgent and self._reprioritize is not None:
            self._reprioritize(urgent, priority)

    def adopt_encoders(self, call: ScheduledCall) -> None:
        """Have what others' calls encode for themselves, and `call` waits for, serve it first.

        It is first in turn. Else it would wait for what waits for room beside it.
        """
        sources = (parent.patch.source for parent in call.parents if parent.patch)
        for encoding in (*call.parents, *sources):
            for encoder in filter(None, map(self._calls.get, encoding.encoders)):
                is_others = encoder.beneficiary is not call.beneficiary
                if is_others and encoder.is_internal and not encoder.is_scheduled:
                    encoder.serve(call)

    def in_order(self) -> list[ScheduledCall]:
        """Waiting calls in vLLM's order, by priority where that is its policy, then by arrival.

        In another one, a call that vLLM preempts for the next one would take from that in turn.
        """
        return sorted(self._waiting.values(), key=lambda call: call.turn)

    def of(self, request: Request) -> tuple[int, float, int]:
        """Turn of a call's request, or of an ordinary one: by priority, then by arrival."""
        call = self._calls.get(request.request_id)
        if call is None:
            return self._priority(request), request.arrival_time, 0
        priority, number = call.turn
        return priority, call.beneficiary.request.arrival_time, number

    def is_first(self, request: Request) -> bool:
        """Return whether no call comes before a request that could run if there is room for it."""
        turn = self.of(request)
        return not any(
            self.of(call.request) < turn
            for call in self._waiting.values()
            if call.request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        )
