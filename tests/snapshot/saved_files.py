# SPDX-License-Identifier: Apache-2.0
"""A folder that keeps one message of one token. As a program: saves and is killed at some point, or
saves again and again.

python -m tests.snapshot.saved_files POINT URI
python -m tests.snapshot.saved_files again URI
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_choreo.errors import UnknownKeptError
from vllm_choreo.snapshot import saving, storage
from vllm_choreo.snapshot.loading import loading
from vllm_choreo.snapshot.manifest import FORMAT, manifest_bytes, read_manifest, tenant_digest
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.steps import Ask, drive
from vllm_choreo.snapshot.storage import SnapshotFolder
from vllm_choreo.snapshot.tensors import KVShape, header_bytes

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
        "encodings": [{**entry, "patch": None, "keeps": [], "is_untrusted": False, "data": data}],
        "messages": [message],
    }


def save(uri: str, token: int, content: bytes = b"new") -> None:
    folder = SnapshotFolder(uri)
    folder.make()
    try:
        replaced = {e["data"]["file"] for e in read_manifest(folder)["encodings"] if e["data"]}
    except UnknownKeptError:
        replaced = set()
    name, file = folder.create()
    with file:
        file.write(content)
    folder.publish(manifest_bytes(kept_of(token, name)), replaced)


MODEL = {"name": "m", "weights": "w", "tokenizer": "t"}
SHAPE = KVShape.of("float32", [[1, 4, 4]])


def save_whole(uri: str, token: int) -> None:
    """As `save` writes it; all numbers of the keys and values are those of the token."""
    folder = SnapshotFolder(uri)
    folder.make()
    name, file = folder.create()
    content = header_bytes(SHAPE, 1, {}) + np.full(8, token, np.float32).tobytes()
    with file:
        file.write(content)
    kept = kept_of(token, name)
    kept["model"] = MODEL
    kept["encodings"][0]["data"] |= {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    kept["messages"][0] |= {
        "metrics": {"waiting": None, "ttft": 0.0, "latency": 0.0},
        "finish_reason": None,
    }
    folder.publish(manifest_bytes(kept), saving._files_of(folder))


def _save_again_and_again(uri: str) -> None:
    """Until it is killed; a line for each."""
    for token in itertools.count(1):
        save_whole(uri, token)
        print(token, flush=True)


def found(uri: str) -> tuple[int, bytes]:
    folder = SnapshotFolder(uri)
    (entry,) = read_manifest(folder)["encodings"]
    with folder.open(entry["data"]["file"])[0] as file:
        return entry["tokens"][0], file.read()


def _killed(at: str, uri: str) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where = {
        "data": (SnapshotFolder, "publish"),
        "manifest": (storage, "settle"),
        "move": (type(SnapshotFolder(uri)._fs), "mv"),
        "clean": (SnapshotFolder, "_clean"),
    }
    setattr(*where[at], die)
    save(uri, 2)


class _Engine:
    """What a load asks for.

    Args:
        overtaken: is called with the token of the manifest that was read.

    Attributes:
        written: keys and values.
    """

    def __init__(self, overtaken: Callable[[int], None]) -> None:
        self.written = b""
        self._overtaken = overtaken

    def answer(self, ask: Ask) -> Any:
        name, *args = ask.args
        if ask.what == "session":
            return name(*args)
        if name == "snapshot_begin":
            self._overtaken(args[2]["encodings"][0]["tokens"][0])
        if name == "choreo_write_kv":
            self.written += bytes(args[0])
        return {
            "choreo_kv_shape": [
                {
                    "dtype": "float32",
                    "layers": [[1, 4, 4]],
                    "groups": [0],
                    "scales": [],
                    "hidden": ["float32", 0],
                    "states": [],
                },
            ],
            "snapshot_begin": 0,
            "snapshot_allocate": {
                "blocks": [[0]],
                "firsts": [0],
                "in_host": False,
                "hidden": None,
                "state": None,
            },
        }.get(name)


def load_whole(uri: str, overtaken: Callable[[int], None]) -> tuple[int, bytes]:
    """The token of the message that is kept, and its keys and values."""
    engine, target = (
        _Engine(overtaken),
        Origin("new", tenant_digest("a"), MODEL, num_ranks=1, num_heads=1),
    )

    def names_of(session: str, ids: Sequence[str]) -> dict[str, str]:
        return {message_id: f"new/{message_id}" for message_id in ids}

    steps = loading(
        *(SnapshotFolder(uri), target, "a", names_of),
        *(lambda messages: None, lambda: None, "refuse", False),
    )
    (message,) = drive(steps, engine.answer).messages
    return message.token_ids[0], engine.written


if __name__ == "__main__":
    if sys.argv[1] == "again":
        _save_again_and_again(sys.argv[2])
    else:
        _killed(*sys.argv[1:])
