# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a parent whose length is not known yet."""

from __future__ import annotations

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.store.encoding import Encoding


class Parking:
    """Calls by the first parent that they wait for.

    They cost no step anything, however many there are: vLLM's queue does not have them.
    """

    def __init__(self) -> None:
        self._parked: dict[Encoding, dict[str, ScheduledCall]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def park(self, call: ScheduledCall) -> bool:
        """Have a call wait for its first parent that is not known; False: there is none."""
        call.parked_on = None
        parents = call.parents if call.encoding.plan is None else ()
        if any(parent.message.failure for parent in parents):
            return False  # `resolve` raises it
        call.parked_on = next((p for p in parents if not (p.is_known and p.plan)), None)
        if call.parked_on is not None:
            self._parked.setdefault(call.parked_on, {})[call.id] = call
        return call.parked_on is not None

    def take(self, encoding: Encoding) -> list[ScheduledCall]:
        """Take the calls that waited for an encoding alone, if it is known now, or failed."""
        if not (encoding.message.failure or (encoding.is_known and encoding.plan)):
            return []
        return [c for c in self._parked.pop(encoding, {}).values() if not self.park(c)]

    def leave(self, call: ScheduledCall) -> None:
        """Forget a call that has ended."""
        if call.parked_on is None:
            return
        calls = self._parked[call.parked_on]
        del calls[call.id]
        if not calls:
            del self._parked[call.parked_on]
