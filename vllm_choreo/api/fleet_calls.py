# SPDX-License-Identifier: Apache-2.0
"""Calls on one of several engines, and messages of a session that the engine has."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.api.outcomes import Outcome, metrics_of
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe
from vllm_choreo.errors import ChoreoError, ParentFailedError
from vllm_choreo.fleet.placement import Placement
from vllm_choreo.semantics.call import Result
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
        makes: recipe of the message that it makes; None: its tokens are generated.
        has_begun: True if the engine was handed the call.
    """

    placed: Placement
    known: Known
    recipes: Sequence[CallRecipe]
    makes: CallRecipe | None = None
    has_begun: bool = False

    @property
    def engine(self) -> int:
        return self.placed.engine


async def until_complete(parent: Pending) -> None:
    """Wait for the message of a parent.

    Raises:
        ParentFailedError: there will be none.
    """
    if isinstance(await parent.result(), ChoreoError):
        raise ParentFailedError(
            "the parent was never completed: the call that makes it failed; call it again",
            parameter="parents",
            value=parent.id,
        )


async def begun_or_over(begun: asyncio.Event, future: asyncio.Future[Result]) -> None:
    """Wait until an engine has a call, or its result is there."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait([waiting, future], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


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
