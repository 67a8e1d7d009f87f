# SPDX-License-Identifier: Apache-2.0
"""A folder that keeps one message of one token. As a program: saves and is killed at some point.

python -m tests.core.kept_files POINT URI
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from vllm_choreo.errors import UnknownKeptError
from vllm_choreo.keep import storage
from vllm_choreo.keep.manifest import FORMAT, manifest_bytes, read_manifest, tenant_digest
from vllm_choreo.keep.storage import KeptFolder

KEPT: dict[str, Any] = {"format": FORMAT, "model": {}, "tenant": tenant_digest("a"), "session": "s"}
KEPT |= {"adapters": [], "traces": [{"id": "s/0", "parents": [], "origin": None}]}


def kept_of(token: int, file: str | None) -> dict[str, Any]:
    """The manifest of one message of one token."""
    data = {"file": file, "bytes": 3, "sha256": "x", "stored_position": 0} if file else None
    entry = {"message": "s/0", "is_copy": False, "trace": 0, "adapter": None, "tokens": [token]}
    entry |= {"parents": [], "spans": [], "new_offset": 0, "exact": True, "repaired_tokens": 0}
    entry |= {"weights": None}
    message = {"id": "s/0", "position": 0, "num_tokens": 1, "token_ids": [token], "text": "é"}
    message |= {"generated_token_ids": [], "generated_text": "", "usage": {}, "metrics": {}}
    message |= {"parents": [], "encoding": 0}
    return {
        **KEPT,
        "encodings": [{**entry, "patch": None, "keeps": [], "data": data}],
        "messages": [message],
    }


def save(uri: str, token: int, content: bytes = b"new") -> None:
    folder = KeptFolder(uri)
    folder.make()
    try:
        replaced = {e["data"]["file"] for e in read_manifest(folder)["encodings"] if e["data"]}
    except UnknownKeptError:
        replaced = set()
    name, file = folder.create()
    with file:
        file.write(content)
    folder.publish(manifest_bytes(kept_of(token, name)), replaced)


def found(uri: str) -> tuple[int, bytes]:
    folder = KeptFolder(uri)
    (entry,) = read_manifest(folder)["encodings"]
    with folder.open(entry["data"]["file"])[0] as file:
        return entry["tokens"][0], file.read()


def _killed(at: str, uri: str) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where = {
        "data": (KeptFolder, "publish"),
        "manifest": (storage, "settle"),
        "move": (type(KeptFolder(uri)._fs), "mv"),
        "clean": (KeptFolder, "_clean"),
    }
    setattr(*where[at], die)
    save(uri, 2)


if __name__ == "__main__":
    _killed(*sys.argv[1:])
