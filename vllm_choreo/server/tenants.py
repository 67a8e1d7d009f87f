# SPDX-License-Identifier: Apache-2.0
"""Who a request belongs to: the holder of its API key, under a name that tells nothing of the key.

The name is an HMAC under a secret of this process, or of the operator's folder of kept messages, so
what is logged, or sent to the engine,
cannot be matched against guessed keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from starlette.requests import Request

_secret = secrets.token_bytes(32)


def use_secret(secret: bytes) -> None:
    """Take a secret that outlives this process, so that tenants have the same names in the next.

    Whoever has it, and a log of names, can try keys against these: it is the operator's alone.
    """
    global _secret
    _secret = secret


def tenant_of(request: Request) -> str:
    """The tenant that sent `request`: 64 hexadecimal digits, the same for the same bearer token.

    Requests without a token are those of one tenant; whether they are served at all is decided by
    vLLM's `--api-key` before.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token if scheme.lower() == "bearer" else ""
    return hmac.new(_secret, token.encode(), hashlib.sha256).hexdigest()
