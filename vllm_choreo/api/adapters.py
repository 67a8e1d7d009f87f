# SPDX-License-Identifier: Apache-2.0
"""Adapters of calls: the one that a call names, or the session's where its placement says so.

| placement | prefill | decode |
|---|---|---|
| writer | with it | without |
| reader | without | with it |
| both | with it | with it |
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.errors import AdapterError, ChoreoError, UnsupportedOptionError
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.trained_adapter import (
    FILE_NAME,
    PEFT_FILES,
    ModelIdentity,
    TrainedAdapter,
    adapter_weights,
    uses_adapter,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

# Of both files that say what an adapter is: when it changed, in ns, and its size; None: not there.
_Stamp = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class WithAdapter:
    """Stands in place of a call's adapter: used if its placement has such calls use it.

    Attributes:
        adapter: a `LoRARequest` or a folder, as a session takes it.
    """

    adapter: object


class SessionAdapters:
    """The adapters of a session's calls.

    Args:
        vllm_config: the engine's.
        options: the session's. `adapter`: adapter of calls that name none: a `LoRARequest`, a
            folder, or the name of the model for none. `placement`: the calls that use adapters in
            this session; None: as the folder of each says (`choreo_train.json`), and all calls
            where it does not.

    Raises:
        AdapterError: a folder that does not say where its adapter is used, while `placement` does
            not either; or an adapter that does not fit the engine.
        ChoreoError: no such adapter or placement.
    """

    def __init__(self, vllm_config: VllmConfig, options: SessionOptions) -> None:
        adapter, placement = options.adapter, options.placement
        self._vllm_config = vllm_config
        self._given_placement = placement
        self._fitting: dict[Path, _Stamp] = {}  # folders that have been checked
        self._adapter = self._checked(adapter)
        if placement is not None:
            uses_adapter(placement, generates=True)
        if self._adapter is None:
            if placement is not None:
                raise ChoreoError(
                    "a placement is that of an adapter: name the adapter, too",
                    parameter="placement",
                    value=placement,
                )
        elif self._placement_of(self._adapter) is None and isinstance(adapter, (str, Path)):
            raise AdapterError(
                f"the folder has no {FILE_NAME}, which would say which calls use the adapter: say "
                'placement="prefill", "decode" or "both"',
                parameter="adapter",
                value=str(adapter),
            )

    @property
    def placement(self) -> str | None:
        """Placement of the session's adapter; None: the session has no adapter."""
        return self._adapter and (self._placement_of(self._adapter) or "both")

    @property
    def identity(self) -> str:
        """The session's adapter and its placement as text."""
        return f"{self._adapter or ''} {self.placement or ''}"

    def of(self, kind: str, given: object) -> LoRARequest | None:
        """The `LoRARequest` that encodes a call and generates, or None.

        Args:
            kind: "prefill" or "decode".
            given: the adapter that the call names, a `WithAdapter`, or None.

        Raises:
            AdapterError: the call names an adapter that calls of its kind do not use, or that
                does not fit the engine.
            ChoreoError: no such adapter.
        """
        if given is None:
            given = WithAdapter(self._adapter)
        is_placed = isinstance(given, WithAdapter)
        request = self._checked(given.adapter if isinstance(given, WithAdapter) else given)
        if request is None:
            return None
        placement = self._placement_of(request) or "both"
        if uses_adapter(placement, kind == "decode"):
            return request
        if is_placed:
            return None
        raise _contradicts(kind, placement, request)

    def _placement_of(self, request: LoRARequest) -> str | None:
        """Placement of an adapter; None: neither the session nor its folder says it."""
        trained = _trained(request)
        return self._given_placement or (trained.placement if trained else None)

    def _checked(self, given: object) -> LoRARequest | None:
        """The `LoRARequest` of what was given; None: the model itself."""
        config = self._vllm_config.model_config
        names = config.served_model_name, config.model
        if given is None or given in names:
            return None
        request = _request_of(given)
        if request is None:
            raise ChoreoError(
                "in process an adapter is a folder that there is, or a vllm.lora.request."
                f"LoRARequest; the name of the model ({names[0]}) stands for none",
                parameter="adapter",
                value=given,
            )
        if self._vllm_config.lora_config is None:
            raise UnsupportedOptionError(
                "the engine takes no adapters: start it with enable_lora=True",
                parameter="adapter",
                value=request.lora_name,
            )
        folder = _folder(request)
        stamp = _stamp(folder)
        if self._fitting.get(folder) != stamp:
            _check_fits(request, self._vllm_config)
            self._fitting[folder] = stamp
        return request


def _request_of(given: object) -> LoRARequest | None:
    """The `LoRARequest`; of a folder always the same. None: it is no adapter."""
    if isinstance(given, (str, Path)):
        folder = Path(given).expanduser().absolute()
        if not folder.is_dir():
            return None
        from vllm.lora.request import LoRARequest

        # Above 0, and small enough for any integer of vLLM's workers.
        digest = blake2b(str(folder).encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "little") % (2**31 - 1) + 1
        return LoRARequest(str(folder), number, str(folder))
    # Whoever has such an object has imported the module that defines it.
    module = sys.modules.get("vllm.lora.request")
    return given if module is not None and isinstance(given, module.LoRARequest) else None


def _contradicts(kind: str, placement: str, request: LoRARequest) -> AdapterError:
    users = "calls that encode messages" if placement == "prefill" else "calls that generate"
    return AdapterError(
        f"a {kind} names an adapter that {users} alone use (placement {placement}): leave "
        'it out, or open the session with the adapter and placement="both"',
        parameter="adapter",
        value=request.lora_name,
    )


# -- what is on the disk -------------------------------------------------------------------------


def _trained(request: LoRARequest) -> TrainedAdapter | None:
    """Record that training left beside the adapter; None: we did not train it."""
    folder = _folder(request)
    stamp = _stamp(folder)[0]
    return None if stamp is None else _load(folder, *stamp)


def _check_fits(request: LoRARequest, vllm_config: VllmConfig) -> None:
    """Check that vLLM can load the adapter. Raises AdapterError: not so, or of another model."""
    trained, model = _trained(request), vllm_config.model_config.model
    if trained is not None and not trained.base.same_as(base_model(model)):
        raise AdapterError(
            f"the adapter was trained on {trained.base.name}; weights or tokenizer of the model "
            f"that is served, {base_model(model).name}, are others: serve that model, or train "
            "an adapter of this one",
            parameter="adapter",
            value=request.lora_name,
        )
    # What lies in no folder here is the worker's to find, or to refuse.
    if _folder(request).is_dir():
        from vllm_choreo.engine.lora import check_loadable

        check_loadable(_folder(request), vllm_config.lora_config)


def _folder(request: LoRARequest) -> Path:
    return Path(request.lora_path).expanduser()


def _stamp(folder: Path) -> _Stamp:
    return tuple(_stamp_of(folder / name) for name in (FILE_NAME, PEFT_FILES[0]))


def _stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=64)
def _load(folder: Path, *stamp: int) -> TrainedAdapter:
    """Read what training wrote into a folder; again when the file changes."""
    return TrainedAdapter.load(folder)


def adapter_weights_of(request: LoRARequest | None) -> str | None:
    """Digest of the weights of a call's adapter; None: it uses none; "": they are not here."""
    if request is None:
        return None
    folder = _folder(request)
    return _weights(folder, _stamp_of(folder / PEFT_FILES[1]))


@lru_cache(maxsize=64)
def _weights(folder: Path, stamp: tuple[int, int] | None) -> str:
    """Digest an adapter's weights; again when the file changes."""
    return adapter_weights(folder)


@lru_cache(maxsize=8)
def base_model(model: str) -> ModelIdentity:
    """The model of an engine, as its configuration names it."""
    return ModelIdentity.of(model)
