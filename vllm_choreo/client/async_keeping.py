# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` of `AsyncChoreoClient`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_choreo.client import exchanges
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Kept, Message


class AsyncKeeping:
    """Mixin of the client, whose session and connection it uses."""

    async def save(
        self: Any,
        messages: Sequence[Named] | None,
        uri: str,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Kept:
        """Keep messages on the server: `ChoreoClient.save`."""
        exchange = exchanges.saving(await self.open(), messages, uri, encodings)
        kept: Kept = await self._exchange(exchange)
        return kept

    async def load(
        self: Any,
        uri: str,
        *,
        on_mismatch: str = "refuse",
        progress: bool | None = None,
    ) -> list[Message]:
        """Load messages that the server keeps: `ChoreoClient.load`."""
        exchange = exchanges.loading(await self.open(), uri, on_mismatch)
        messages: list[Message] = await self._exchange(exchange)
        return messages
