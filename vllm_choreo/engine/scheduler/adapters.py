# SPDX-License-Identifier: Apache-2.0
"""Which weights an adapter has: by the files that hold them, for a name may be given to others.

vLLM tells adapters apart by their names and loads one when a request first brings its number. An
adapter that is trained on and loaded again under the same name is another one: what it encoded
before is neither what it encodes now, nor can it be encoded again.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from vllm_choreo.errors import ChoreoError
from vllm_choreo.store.encoding import Adapter

# Of each file: name, size, time of the last change in ns. Read at every request, for microseconds;
# the contents only when it changes.
_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """The adapters that requests have brought, by vLLM's number."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[_Stamp, Adapter]] = {}

    def identify(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter of a request, by the weights that it finds.

        Where files have changed since the worker loaded them, the request is made to load them
        again: otherwise the worker would do so some time later, unseen.
        """
        if request is None:
            return None
        folder = Path(get_adapter_absolute_path(request.lora_path))
        files = sorted(path for path in folder.glob("*") if path.is_file())
        stats = [(path, path.stat()) for path in files]
        stamp = tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
        known = self._latest.get(request.lora_int_id)
        if known and known[0] == stamp:
            return known[1]
        # A folder that cannot be read is the worker's to refuse.
        weights = _digest(files) if files else request.lora_path.encode()
        if known and known[1].weights != weights:
            request.load_inplace = True
        adapter = Adapter(weights, msgspec.structs.replace(request, load_inplace=False))
        self._latest[request.lora_int_id] = stamp, adapter
        return adapter

    def is_current(self, adapter: Adapter | None) -> bool:
        """Whether what it encoded can be encoded again, with the same weights."""
        return adapter is None or self.identify(adapter.request) == adapter


def replaced(adapter: Adapter, message_id: str) -> ChoreoError:
    """The error of a call that reads what cannot be encoded again."""
    return ChoreoError(
        f"the message was evicted, and the weights of adapter {adapter.request.lora_name!r} that "
        "encoded it have been replaced: encode it anew (reencode), or load new weights under a "
        "new name",
        parameter="parents",
        value=message_id,
    )


def _digest(files: list[Path]) -> bytes:
    digest = blake2b(digest_size=32)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as content:
            while chunk := content.read(2**20):
                digest.update(chunk)
    return digest.digest()
