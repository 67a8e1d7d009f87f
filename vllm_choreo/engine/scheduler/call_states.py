# SPDX-License-Identifier: Apache-2.0
"""States that calls begin with, in models that have some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.state_starts import StateOrigin
from vllm_choreo.store.store import MessageStore


class CallStates:
    """Encodings whose states calls need.

    Args:
        waiting: calls that wait for room, by request id.
    """

    def __init__(self, store: MessageStore, waiting: Mapping[str, ScheduledCall]) -> None:
        self._has_states = store.states is not None
        self._waiting = waiting

    def origin(self, call: ScheduledCall) -> StateOrigin | None:
        """Origin of the state of a call; None: the model has none."""
        return StateOrigin.of(call.parents) if self._has_states else None

    def begun_with(self, call: ScheduledCall) -> tuple[Encoding, ...]:
        """Encodings whose states a call begins with."""
        origin = self.origin(call)
        return origin.encodings if origin else ()

    def needed(self, call: ScheduledCall | None) -> Iterator[set[Encoding]]:
        """Encodings whose states are kept while one is found for a request that starts.

        First those that all calls that wait begin with; then those that this call begins with, and
        all that run for the same caller's; then those of itself and of the calls that it serves,
        then its own: who is alone may take from others, and last from itself.

        Args:
            call: None: the request is no call.
        """
        served = [*call.with_served()] if call is not None else []
        together = [*call.beneficiary.with_helpers()] if call is not None else []
        for calls in ([*together, *self._waiting.values()], together, served, served[:1]):
            yield set[Encoding]().union(*map(self.begun_with, calls))
