# SPDX-License-Identifier: Apache-2.0
"""`SessionOptions`: all that a session is opened with, in process, over HTTP and on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vllm_choreo.repair.pair_rule import ChosenCell
from vllm_choreo.repair.session_rules import SessionRule
from vllm_choreo.semantics.call import check_mode
from vllm_choreo.trained_adapter import current_placement

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

AdapterGiven: TypeAlias = "str | Path | LoRARequest | None"
RepairGiven = str | Path | Mapping[str, Any] | SessionRule | None
OnChoice = Callable[[ChosenCell], None]


class SessionLimits(Protocol):
    """Limits of a session's messages that are not freed."""

    @property
    def max_messages_per_session(self) -> int: ...

    @property
    def max_tokens_per_session(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session, as its caller gave them.

    Attributes:
        mode: mode of calls that name none; in "baseline" every call is text, whatever it names.
        tenant: owner of the session; identical messages of one tenant are encoded once.
        adapter, placement, repair: defaults of calls that name none, see `Choreography`.
        ttl_seconds: seconds after which a server closes the session if it is not used; None: the
            server's default. In process it stays open.
        limits: limits of its messages; None: none.
        session_id: id of a session of an earlier process, whose messages are to be loaded; None:
            a new one.
        on_choice: function that is told which layers a pair's profile chooses for a call.

    Raises:
        ChoreoError: no such mode. The rest is checked by whoever opens the session.
    """

    mode: str = "choreo"
    tenant: str = ""
    adapter: AdapterGiven = None
    placement: str | None = None
    repair: RepairGiven = None
    ttl_seconds: float | None = None
    limits: SessionLimits | None = None
    session_id: str | None = None
    on_choice: OnChoice | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        object.__setattr__(self, "placement", current_placement(self.placement))
