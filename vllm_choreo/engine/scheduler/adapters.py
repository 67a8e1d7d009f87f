# SPDX-License-Identifier: Apache-2.0
"""Adapters told apart by the files of their weights, for a name may be given to others.

vLLM tells adapters apart by their names and loads one when a request first brings its number. An
adapter that is trained on and loaded again under the same name is another one: what it encoded
before is neither what it encodes now, nor can it be encoded again.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.other_model import OtherModel
from vllm_choreo.store.encoding import Adapter

# Of each file: name, size, time of the last change in ns. Read at every request, for microseconds;
# the contents only when it changes.
_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """Adapters that requests have brought, by vLLM's number."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[_Stamp, Adapter]] = {}
        self._reloads: list[LoRARequest] = []

    def identify(self, request: Request) -> Adapter | None:
        """Identify the adapter of a request by its weights on the disk.

        Workers load files that have changed since they loaded them again with the next step, before
        anything is run: what is encoded for the request comes before the request itself.

        Raises:
            ChoreoError: the files cannot be read.
        """
        lora = request.lora_request
        if lora is None:
            return None
        try:
            files, stamp = _stamp(lora)
            known = self._latest.get(lora.lora_int_id)
            if known and known[0] == stamp:
                return known[1]
            # What lies in no folder here is the worker's to find, or to refuse.
            weights = _digest(files) if files else lora.lora_path.encode()
        except OSError as error:
            raise ChoreoError(
                f"the adapter's files cannot be read ({error}): call again when they are there",
                parameter="adapter",
                value=lora.lora_path,
            ) from None
        if known and known[1].weights != weights:
            self._reloads.append(msgspec.structs.replace(lora, load_inplace=True))
        adapter = Adapter(weights, msgspec.structs.replace(lora, load_inplace=False))
        self._latest[lora.lora_int_id] = stamp, adapter
        return adapter

    def take_reloads(self) -> tuple[LoRARequest, ...]:
        """Take the adapters that workers load again before they run the step just planned."""
        reloads, self._reloads = tuple(self._reloads), []
        return reloads

    def add_from_folder(self, lora: LoRARequest) -> None:
        """Add an adapter by its folder, before any request brings it, if its number is new."""
        if lora.lora_int_id in self._latest:
            return
        try:
            files, stamp = _stamp(lora)
            if files:
                self._latest[lora.lora_int_id] = stamp, Adapter(_digest(files), lora)
        except OSError:
            return

    def of_weights(self, weights: bytes) -> Adapter | None:
        """Known adapter whose weights have this digest, or None."""
        known = (adapter for _, adapter in self._latest.values() if adapter.weights == weights)
        return next(known, None)

    def is_current(self, adapter: Adapter | None) -> bool:
        """Return whether messages that the adapter encoded can be encoded again with its weights.

        Only looks: what is new on the disk becomes known with the request that loads it.
        """
        if adapter is None:
            return True
        known = self._latest.get(adapter.request.lora_int_id)
        try:
            return known is not None and known == (_stamp(adapter.request)[1], adapter)
        except OSError:
            return False


def adapter_replaced_error(adapter: Adapter, message_id: str) -> ChoreoError:
    """Error of a call that reads an evicted message whose adapter's weights are there no more."""
    name = adapter.request.lora_name
    if isinstance(adapter.request, OtherModel):
        what = f"another model, {name!r}, made it: load it again, or encode it anew (reencode)"
    else:
        what = (
            f"the weights of adapter {name!r} that encoded it have been replaced: encode it anew "
            "(reencode), or load new weights under a new name"
        )
    return ChoreoError(
        f"the message was evicted, and {what}",
        parameter="parents",
        value=message_id,
    )


def _stamp(lora: LoRARequest) -> tuple[list[Path], _Stamp]:
    """Files of an adapter, with their names, sizes and times of change. Raises OSError."""
    folder = Path(lora.lora_path).expanduser()
    # What vLLM loads, under PEFT's names; training leaves more in the folder.
    files = sorted(path for path in folder.glob("adapter_*") if path.is_file())
    stats = [(path, path.stat()) for path in files]
    return files, tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _digest(files: list[Path]) -> bytes:
    digest = blake2b(digest_size=32)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as content:
            while chunk := content.read(2**20):
                digest.update(chunk)
    return digest.digest()
