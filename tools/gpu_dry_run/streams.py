# SPDX-License-Identifier: Apache-2.0
"""Streams, events and CUDA graphs of the device double.

Work of the double is done at once, so streams and events only say when copies to the host have
arrived. A graph notes the operations of its capture and replays them on the same memory, with the
numbers that the host had then: what it reads of others has to be alive, and lie where it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tools.gpu_dry_run.device import DEVICE, DeviceDouble, DeviceError, caller, tensors_in


class Stream:
    """Stream of the double."""

    double: DeviceDouble
    device = DEVICE
    _ids = count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = next(self._ids)

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.double.wait("Stream.synchronize")

    def __enter__(self) -> Stream:
        _CURRENT.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()


class Generator(torch.Generator):
    """Generator of random numbers; those of the double draw on the host."""

    def __new__(cls, device: object = None) -> Generator:
        return super().__new__(cls, "cpu")


class Event:
    """Event of the double: the copies to the host that were on their way when it was recorded."""

    double: DeviceDouble

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._copies: list[torch.Tensor] = []

    def record(self, stream: Stream | None = None) -> None:
        self._copies = [target for target, _ in self.double.arriving]

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        """Wait for what came before. Of a step that is planned ahead it is how results are got."""
        waiting = {id(target) for target, _ in self.double.arriving}
        self.double.arrive(sum(id(target) in waiting for target in self._copies))


@dataclass(frozen=True)
class _Held:
    """A tensor of others that a graph uses without keeping it alive."""

    storage: StorageWeakRef
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    where: str

    @classmethod
    def of(cls, tensor: torch.Tensor, where: str) -> _Held:
        storage = StorageWeakRef(tensor.untyped_storage())
        where_it_lies = tensor.storage_offset(), tensor.size(), tensor.stride()
        return cls(storage, *where_it_lies, tensor.dtype, where)

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            DeviceError: nobody has kept it.
        """
        storage = None
        if not self.storage.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise DeviceError(
                f"a CUDA graph reads {list(self.size)} {self.dtype}, which was freed after its "
                f"capture; captured at {self.where}"
            )
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Noted:
    """An operation of a capture; `results` are where it left them."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[Any, ...]


class CUDAGraph:
    """CUDA graph of the double.

    Attributes:
        num_replays: how often graphs of this process were replayed.
    """

    double: DeviceDouble
    num_captures = 0
    num_replays = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._noted: list[_Noted] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.double.recorder is not None:
            raise DeviceError("a CUDA graph is captured already")
        self.double.recorder = self

    def capture_end(self) -> None:
        self.double.recorder = None
        type(self).num_captures += 1

    def add(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[torch.Tensor],
    ) -> None:
        """Note an operation that has just run."""
        with torch._C.DisableTorchFunction():
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            for result in results:
                storage = result.untyped_storage()
                if storage._cdata not in given:
                    self._own[storage._cdata] = storage
            where = caller()
            noted = (self._freeze(value, where) for value in (args, kwargs, tuple(results)))
            self._noted.append(_Noted(func, *noted))

    def replay(self) -> None:
        """Run what was captured again.

        Raises:
            DeviceError: memory that it reads was freed.
        """
        type(self).num_replays += 1
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for noted in self._noted:
                args, kwargs = _thaw(noted.args), _thaw(noted.kwargs)
                found = list(tensors_in(noted.func(*args, **kwargs)))
                for result, target in zip(found, noted.results, strict=bool(noted.results)):
                    kept = _thaw(target)
                    if kept.data_ptr() != result.data_ptr():
                        kept.copy_(result)

    def reset(self) -> None:
        self._noted.clear()
        self._own.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def _freeze(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            is_own = value.untyped_storage()._cdata in self._own
            return value if is_own else _Held.of(value, where)
        if isinstance(value, tuple):
            return tuple(self._freeze(each, where) for each in value)
        if isinstance(value, list):
            return [self._freeze(each, where) for each in value]
        if isinstance(value, dict):
            return {key: self._freeze(each, where) for key, each in value.items()}
        return value


def _thaw(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.tensor()
    if isinstance(value, tuple):
        return tuple(_thaw(each) for each in value)
    if isinstance(value, list):
        return [_thaw(each) for each in value]
    if isinstance(value, dict):
        return {key: _thaw(each) for key, each in value.items()}
    return value


@contextmanager
def _capturing(
    graph: CUDAGraph, pool: object = None, stream: Stream | None = None, **_: object
) -> Iterator[None]:
    with stream or Stream():
        graph.capture_begin(pool)
        try:
            yield
        finally:
            graph.capture_end()


_CURRENT: list[Any] = []


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


def _set_current(stream: Stream) -> None:
    _CURRENT[-1] = stream


def install(double: DeviceDouble) -> None:
    """Put these in torch's place, and let it tell the memory of the double."""
    for kind in (Stream, Event, CUDAGraph):
        kind.double = double  # type: ignore[attr-defined]
    _CURRENT.append(Stream())
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": _capturing,
        "stream": _on,
        "set_stream": _set_current,
        "current_stream": lambda *args: _CURRENT[-1],
        "default_stream": lambda *args: _CURRENT[0],
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: double.recorder is not None,
        "synchronize": lambda *args: double.wait("torch.cuda.synchronize"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "set_device": lambda device: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }.items():
        setattr(torch.cuda, name, value)
    torch.Event = Event  # type: ignore[misc,assignment]
    torch.Generator = Generator  # type: ignore[misc]
    _install_memory(double)


def _install_memory(double: DeviceDouble) -> None:
    total = torch.cuda.get_device_properties(0).total_memory

    def memory_info(*args: Any) -> tuple[int, int]:
        return total - double.allocated_bytes(), total

    def allocated(*args: Any) -> int:
        return double.allocated_bytes()

    def stats(*args: Any) -> dict[str, int]:
        return {"allocated_bytes.all.peak": allocated(), "allocated_bytes.all.current": allocated()}

    def nothing(*args: Any) -> None:
        pass

    of_memory = {
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), allocated),
        "memory_stats": stats,
        "empty_cache": nothing,
        "empty_host_cache": nothing,
        "reset_peak_memory_stats": nothing,
    }
    for owner in (torch.cuda, torch.accelerator, torch.accelerator.memory):
        for name, value in of_memory.items():
            setattr(owner, name, value)
    torch.cuda.mem_get_info = torch.accelerator.get_memory_info = memory_info
    torch.cuda.memory.get_allocator_backend = lambda: "of the double"
    torch.accelerator.set_device_index = nothing
    torch.accelerator.synchronize = lambda *args: double.wait("torch.accelerator.synchronize")
