# SPDX-License-Identifier: Apache-2.0
"""Calls on one of several engines, and messages of a session that the engine has."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_choreo.api.outcomes import Outcome, metrics_of
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.fleet.placement import Placement
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace


@dataclass
class Known:
    """Messages of a session that one life of an engine has.

    Attributes:
        life: number of the life.
        ids: messages that the engine knows: the keys of their encodings.
        holds: running calls that need a message, by its id: it is not freed there meanwhile.
    """

    life: int
    ids: dict[str, bytes] = field(default_factory=dict)
    holds: Counter[str] = field(default_factory=Counter)


@dataclass
class Running:
    """A call on an engine.

    Attributes:
        placed: the engine, and the work that the call adds there.
        known: messages of the session that this life of the engine has.
        recipes: messages that the call names.
        has_begun: True if the engine was handed the call.
    """

    placed: Placement
    known: Known
    recipes: Sequence[CallRecipe]
    has_begun: bool = False

    @property
    def engine(self) -> int:
        return self.placed.engine


async def last_output(queue: OutputQueue) -> Outcome:
    """The last output of a request that nobody watches."""
    try:
        while True:
            output = queue.get_nowait() or await queue.get()
            if output.finished:
                return Outcome(output, metrics_of(output, 0.0, 0.0, 0.0))
    finally:
        queue.close()


def may_run_again(handle: Pending) -> bool:
    """Return whether a call run again gives what was seen of it, as far as that goes."""
    params = handle.call.sampling_params
    if params is None or params.temperature == 0 or params.seed is not None:
        return True
    return handle._latest is None or not handle._latest.output.outputs[0].token_ids


def reading_call(session: str, tenant: str, message_id: str) -> PlannedCall:
    """A call that reads a message and is of no use else: what it reads is encoded when it ends."""
    params = ChoreoParams(
        parents=(ParentSpan(message_id),),
        save_as=f"{session}/read-{secrets.token_hex(8)}",
        kind="prefill",
        session=session,
        tenant=tenant,
    )
    return PlannedCall("", (0,), params, None, Trace(message_id))
