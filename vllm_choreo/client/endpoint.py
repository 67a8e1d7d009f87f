# SPDX-License-Identifier: Apache-2.0
"""The server's address, the key, and how long to wait: what both clients set up httpx with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_choreo.errors import ChoreoError

_CONNECT_SECONDS = 10.0
# Uvicorn closes connections that were idle for 5 s. One that is used at that very moment breaks,
# and a request that may have been read is not repeated: so they are given up before.
_IDLE_SECONDS = 3.0


@dataclass(frozen=True)
class Endpoint:
    """Address of a server, with the key and the timeout of its requests.

    Attributes:
        base_url: address of the server, without the path `/v1`.
        api_key: None for a server that asks for none.
        timeout: the longest time to wait for an answer, or for more of a stream, in seconds.

    Raises:
        ChoreoError: no address, or no time.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: float

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
            is_address = url.scheme in ("http", "https") and bool(url.host)
        except (httpx.InvalidURL, TypeError):
            is_address = False
        if not is_address:
            raise ChoreoError(
                "the address of a server is needed, for example http://127.0.0.1:8000",
                parameter="base_url",
                value=self.base_url,
            )
        if type(self.timeout) not in (int, float) or not self.timeout > 0:
            raise ChoreoError("choose a number > 0", parameter="timeout", value=self.timeout)
        if self.api_key is not None and not (
            isinstance(self.api_key, str) and self.api_key.isascii() and self.api_key.isprintable()
        ):
            raise ChoreoError("an API key is text of printable ASCII")
        # The OpenAI client is given the address with /v1; here it may be too.
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    def options(self) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "base_url": self.base_url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=_CONNECT_SECONDS, pool=None),
            # Calls that wait for their parents hold a connection each.
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
        }
