# SPDX-License-Identifier: Apache-2.0
"""Tenant of a request: the holder of its API key, under a name that tells nothing of the key.

The name is an HMAC under a secret of this process, or of the operator's folder of snapshots, so
what is logged, or sent to the engine, cannot be matched against guessed keys.

    --api-key alpha beta      two tenants; who sends another key, or none, is none, and gets no
                              session by whatever route
    no --api-key              one tenant: whoever reaches the port. A token that nobody checks makes
                              nobody a tenant, or each new one would bring its own limits
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_choreo.errors import UnknownKeyError

_secret = secrets.token_bytes(32)
_keys: tuple[bytes, ...] = ()  # digests of the server's API keys; none: it asks for none
# By which vLLM's prefix cache knows who sent the request under way; None: all are one.
_salt: ContextVar[str | None] = ContextVar("choreo_cache_salt", default=None)


def use_secret(secret: bytes) -> None:
    """Take a secret that outlives this process, so that tenants have the same names in the next.

    Whoever has it, and a log of names, can try keys against these: it is the operator's alone.
    """
    global _secret
    _secret = secret


def use_keys(keys: Iterable[str]) -> None:
    """Take the API keys of the server: each is a tenant. None: all clients are one."""
    global _keys
    _keys = tuple(_digest(key) for key in keys)


def tenant_of(request: HTTPConnection) -> str:
    """The tenant that sent `request`: 64 hexadecimal digits, the same for the same key.

    Raises:
        UnknownKeyError: the server has keys, and this is none of them. Most routes are closed by
            vLLM before; some are open to everybody.
    """
    token = _token(request) if _keys else ""
    if _keys and not _is_key(token):
        raise UnknownKeyError(
            "sessions and messages belong to an API key: send one of this server's, as "
            "Authorization: Bearer KEY",
            parameter="Authorization",
        )
    return _name(token)


def cache_salt(own: str | None = None) -> str | None:
    """The salt of what a request leaves in vLLM's prefix cache, so that no other tenant finds it.

    Args:
        own: salt that the client has sent.

    Returns:
        None: all clients are one tenant, and the client has sent none.
    """
    salt = _salt.get()
    if salt is None or own is None:
        return salt or own
    return hashlib.sha256(f"{salt}{own}".encode()).hexdigest()


class TenantMiddleware:
    """Middleware that notes who sent each request, for `cache_salt` in all that is done for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Each request is a task with a context of its own.
        if _keys and scope["type"] in ("http", "websocket"):
            token = _token(HTTPConnection(scope))
            # Clients without a key share what the few routes that serve them leave there.
            _salt.set(_name(token if _is_key(token) else ""))
        await self._app(scope, receive, send)


def _token(request: HTTPConnection) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _is_key(token: str) -> bool:
    digest, found = _digest(token), False
    for key in _keys:  # all of them, in a time that tells nothing
        found |= hmac.compare_digest(digest, key)
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _name(token: str) -> str:
    return hmac.new(_secret, token.encode(), hashlib.sha256).hexdigest()
