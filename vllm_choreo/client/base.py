# SPDX-License-Identifier: Apache-2.0
"""Base of both clients: a session on a server, under a policy."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from typing import Self

from vllm_choreo.client import exchanges
from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.naming import message_ids
from vllm_choreo.semantics.session_options import AdapterGiven, RepairGiven, SessionOptions


class ClientBase:
    """A session on a server, whose requests a subclass sends.

    Args:
        base_url: address of the server, for example "http://127.0.0.1:8000".
        api_key: one of those that the server was started with; None if it asks for none.
        mode: "choreo", "exact" or "baseline", as for `Choreography`.
        timeout: the longest time to wait for an answer, in seconds.
        ttl_seconds: the server closes the session if it is not used for so long; None: the
            server's default, which is also the longest.
        adapter: adapter of calls that name none: a LoRA adapter that the server knows, by its name.
        placement: the calls that use it, as for `Choreography`.
        repair: the rule of calls that name none, as for `Choreography`.

    Raises:
        ChoreoError: no such mode, no address, or no time.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        mode: str = "choreo",
        timeout: float = 600.0,
        ttl_seconds: float | None = None,
        adapter: AdapterGiven = None,
        placement: str | None = None,
        repair: RepairGiven = None,
    ) -> None:
        options = SessionOptions(
            mode=mode,
            ttl_seconds=ttl_seconds,
            adapter=adapter,
            placement=placement,
            repair=repair,
        )
        self.mode = mode
        self._endpoint = Endpoint(base_url, api_key, timeout)
        self._opening = exchanges.opening(options)
        self._denied: tuple[str, ...] = ()
        self._connect()

    def _connect(self) -> None:
        """Get ready to send requests."""
        raise NotImplementedError

    def deny(self, *messages: Named) -> Self:
        """Return the session under a policy: `Choreography.deny`.

        That the messages exist is checked with the next call.
        """
        view = copy.copy(self)
        view._denied = (*self._denied, *message_ids(messages, "deny"))
        return view

    def _prompts(self, name: str) -> object:
        """Schemas and prompts as the client had them itself, until it was told apart from pml."""
        warnings.warn(
            f"client.prompts is deprecated: make a vllm_choreo.pml.{name} of the client",
            DeprecationWarning,
            stacklevel=3,
        )
        return getattr(import_module("vllm_choreo.pml"), name)(self)
