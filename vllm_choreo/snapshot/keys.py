# SPDX-License-Identifier: Apache-2.0
"""Keys that tell messages that one has saved oneself from those that others have written.

A manifest has a digest that is keyed with it (`manifest.py`). Whoever has the key is believed: keys
and values that he has saved are shared with whoever sends the same text. Those of others are read
by the sessions that load them, and by nobody else.

    in a program     the file of the setting `keep_key`, else a file of the user's own
    on a server      the file of that setting, else made from the secret of the operator's folder
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from vllm_choreo.errors import ChoreoError

# Shorter ones can be guessed.
MIN_BYTES = 16
_LOGGER = logging.getLogger(__name__)


def key_of_file(path: str) -> bytes:
    """Read the key from the file that the setting names.

    Raises:
        ChoreoError: the file cannot be read, or holds none.
    """
    try:
        content = Path(path).expanduser().read_bytes().strip()
        reason = f"it has {len(content)} bytes, {MIN_BYTES} are needed"
    except OSError as error:
        content, reason = b"", error.strerror or type(error).__name__
    if len(content) < MIN_BYTES:
        raise ChoreoError(
            f"this file holds no key ({reason}): make one with `openssl rand -hex 32`, for whoever "
            "saves and loads, and keep it from others",
            parameter="additional_config.choreo.keep_key",
            value=path,
        )
    return content


def key_of_secret(secret: bytes) -> bytes:
    """Key of a server whose folder has this secret."""
    return hmac.new(secret, b"vllm-choreo keep key", sha256).digest()


def own_key(path: str) -> bytes | None:
    """Key of a program: of the setting's file, else of the user's own, which is made if need be.

    Args:
        path: the file that the setting names, or "".

    Returns:
        None: there is none, and none can be made; a warning says so.
    """
    return key_of_file(path) if path else _users_key(_users_file())


def _users_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "vllm-choreo" / "keep.key"


@cache
def _users_key(path: Path) -> bytes | None:
    try:
        if not path.exists():
            _make(path)
        return key_of_file(str(path))
    except (OSError, ChoreoError) as error:
        _LOGGER.warning(
            "What is saved from here will be untrusted, and shared with no other session: no key "
            "can be kept in %s (%s). Name a file by the setting keep_key.",
            path,
            error,
        )
        return None


def _make(path: Path) -> None:
    """Write a new key for its user's eyes alone, unless another process has just done so."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
