# SPDX-License-Identifier: Apache-2.0
"""A device double: host tensors that say they lie on `cuda:0`, and compute as they would there.

A tensor of the double is an ordinary one in host memory whose storage is marked. While the double
is on, all that Python calls of torch passes here: a marked tensor says that it is on the device,
what is computed from one is marked, and what CUDA refuses is refused: tensors of two devices in one
operation, `numpy()` of a device tensor, host tensors in a kernel of Triton. Copies to the host
arrive when somebody waits for them and hold rubbish until then. Whatever makes the host wait is a
`Sync`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from tools.gpu_dry_run.seams import SEAMS

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
_Function = Callable[..., Any]

# Results depend on values, so the host waits for these to be computed.
_READING = (
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal"),
    *("allclose", "is_nonzero", "bincount", "__contains__", "nonzero_static_"),
)
# They say what a tensor is, and touch nothing of it; or are handled whatever the devices are.
_ANY_DEVICES = ("__set__", "set_", "__get__", "__delete__", "__repr__", "__format__")


@dataclass(frozen=True)
class Sync:
    """The host waited for the device.

    Attributes:
        what: operation that waited.
        where: line of vLLM's or ours that called it, as `file:line function`.
        in_step: whether it was inside a step, and vLLM does not allow it there.
    """

    what: str
    where: str
    in_step: bool

    @property
    def is_ours(self) -> bool:
        return self.where.startswith("vllm_choreo/")


class Recorder(Protocol):
    """What notes operations while a CUDA graph is captured, see `streams.py`."""

    def add(
        self,
        func: _Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[torch.Tensor],
    ) -> None:
        """Note an operation that has just run."""


class DeviceError(RuntimeError):
    """CUDA would refuse this, or read what nobody keeps."""


class DeviceDouble(TorchFunctionMode):
    """The device while this mode is on.

    Attributes:
        syncs: every wait of the host, in order.
        recorder: notes what runs while a CUDA graph is captured; None: none is.
        implementations: Python functions of vLLM's custom operations, by their qualified names.
        is_in_step: says whether a wait now would be one that vLLM does not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[Sync] = []
        self.recorder: Recorder | None = None
        self.implementations: dict[str, _Function] = {}
        self.is_in_step: Callable[[], bool] = lambda: False
        self.arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._marked: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._handlers = _handlers(self)

    # -- what lies where ---------------------------------------------------------------------------

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._marked

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say of a host tensor that it is on the device, with all that share its storage."""
        with torch._C.DisableTorchFunction():
            _keep(self._marked, tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            _keep(self._pinned, tensor.untyped_storage())
        return tensor

    def allocated_bytes(self) -> int:
        """Bytes of device tensors that are alive."""
        total = 0
        for cdata, weak in list(self._marked.items()):
            storage = None
            if not weak.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self._marked[cdata]
            else:
                total += storage.nbytes()
        return total

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """The host waits until all that was asked of the device is done.

        Raises:
            DeviceError: a CUDA graph is being captured.
        """
        if self.recorder is not None:
            raise DeviceError(f"{what} waits for the device while a CUDA graph is captured")
        self.syncs.append(Sync(what, caller(), self.is_in_step()))
        self.arrive()

    def arrive(self, number: int | None = None) -> None:
        """Copies to the host arrive, the first `number` of them or all."""
        # Inference mode: tensors that were made in it are written to here.
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            number = len(self.arriving) if number is None else number
            for target, value in self.arriving[:number]:
                target.copy_(value)
        del self.arriving[:number]

    # -- operations --------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: _Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        return handler(args, kwargs) if handler else self.run(func, args, kwargs)

    def run(self, func: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation where its tensors are; its results lie there, too.

        Raises:
            DeviceError: its tensors are on two devices.
        """
        qualified = _qualified(func)
        if qualified.startswith("_C"):
            SEAMS[f"torch.ops.{qualified.replace('::', '.')} (as the CPU build has it)"] += 1
        implementation = self.implementations.get(qualified)
        if implementation is not None:
            with self:
                return implementation(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        on_device = [self.is_on_device(tensor) for tensor in tensors]
        name = getattr(func, "__name__", str(func))
        if name not in _ANY_DEVICES and any(on_device):
            self._check_same_device(name, tensors, on_device)
        wanted = kwargs.get("device")
        device = DEVICE if any(on_device) else HOST
        if wanted is not None:
            device = device_of(wanted)
            kwargs = {**kwargs, "device": HOST if device.type == "cuda" else device}
        is_pinned = bool(kwargs.get("pin_memory"))
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        if is_pinned:
            return self.pin(result)
        if device.type != "cuda":
            return result
        if name == "tensor" or (name == "as_tensor" and not tensors):
            self.wait(f"torch.{name} with a device")
        results = list(tensors_in(result))
        for tensor in results:
            self.mark(tensor)
        if self.recorder is not None and (results or result is None):
            self.recorder.add(func, args, kwargs, results)
        return result

    def run_across(self, func: _Function, args: tuple[Any, ...]) -> Any:
        """Run an operation whose tensors may lie on both sides."""
        is_there = self.is_on_device(args[0])
        result = func(*args)
        results = list(tensors_in(result))
        for tensor in results if is_there else ():
            self.mark(tensor)
        if is_there and self.recorder is not None:
            self.recorder.add(func, args, {}, results)
        return result

    def launch(
        self, name: str, kernel: _Function, args: Any, kwargs: Any, returns: bool = True
    ) -> Any:
        """Run a kernel, which reads and writes tensors on the device alone.

        Args:
            returns: False of one that returns nothing; a capture notes it and does not run it.

        Raises:
            DeviceError: one of them is in host memory that is not pinned.
        """
        for tensor in tensors_in((args, kwargs)):
            if not (self.is_on_device(tensor) or self.is_pinned(tensor)):
                raise DeviceError(
                    f"{name}: a host tensor of {list(tensor.shape)} {tensor.dtype} cannot be "
                    f"accessed, at {caller()}"
                )
        if self.recorder is not None and not returns:
            self.recorder.add(kernel, args, kwargs, [])
            return None
        with torch._C.DisableTorchFunction():
            result = kernel(*args, **kwargs)
        results = list(tensors_in(result))
        for tensor in results:
            self.mark(tensor)
        if self.recorder is not None:
            self.recorder.add(kernel, args, kwargs, results)
        return result

    def _check_same_device(
        self, name: str, tensors: list[torch.Tensor], on_device: list[bool]
    ) -> None:
        for tensor, is_there in zip(tensors, on_device, strict=True):
            if not is_there and tensor.dim() > 0 and tensor.device.type != "meta":
                raise DeviceError(
                    f"{name}: expected all tensors to be on the same device, but found cuda:0 and "
                    f"a host tensor of {list(tensor.shape)} {tensor.dtype}, at {caller()}"
                )


def _handlers(double: DeviceDouble) -> dict[_Function, Callable[..., Any]]:
    """Functions of torch that are no operations on one device, by the functions."""
    of_tensor = torch.Tensor
    found: dict[_Function, Callable[..., Any]] = {}

    def reading(func: _Function, name: str) -> None:
        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            is_read = any(double.is_on_device(tensor) for tensor in tensors)
            if is_read:
                double.wait(name)
            result = func(*args, **kwargs)
            for tensor in tensors_in(result) if is_read else ():
                double.mark(tensor)
            return result

        found[func] = read

    for name in _READING:
        for owner in (of_tensor, torch):
            if hasattr(owner, name):
                reading(getattr(owner, name), name)
    return found | _placing(double) | _copying(double) | _indexing(double)


def _placing(double: DeviceDouble) -> dict[_Function, Callable[..., Any]]:
    """Functions that say where a tensor lies."""
    of_tensor = torch.Tensor

    def device(args: Any, kwargs: Any) -> torch.device:
        real = of_tensor.device.__get__(*args, **kwargs)
        return DEVICE if double.is_on_device(args[0]) else real

    def is_pinned(args: Any, kwargs: Any) -> bool:
        return double.is_pinned(args[0])

    def pin_memory(args: Any, kwargs: Any) -> torch.Tensor:
        if double.is_on_device(args[0]):
            raise DeviceError(f"only host tensors can be pinned, at {caller()}")
        return double.pin(args[0].clone())

    def numpy(args: Any, kwargs: Any) -> Any:
        if double.is_on_device(args[0]):
            raise DeviceError(f"a tensor on cuda:0 has no numpy(): use cpu() first, at {caller()}")
        return of_tensor.numpy(*args, **kwargs)

    return {
        of_tensor.device.__get__: device,
        of_tensor.is_cuda.__get__: lambda args, kwargs: double.is_on_device(args[0]),
        of_tensor.is_cpu.__get__: lambda args, kwargs: not double.is_on_device(args[0]),
        of_tensor.get_device: lambda args, kwargs: 0 if double.is_on_device(args[0]) else -1,
        of_tensor.is_pinned: is_pinned,
        of_tensor.pin_memory: pin_memory,
        of_tensor.numpy: numpy,
        of_tensor.__array__: numpy,
        of_tensor.record_stream: lambda args, kwargs: None,
    }


def _copying(double: DeviceDouble) -> dict[_Function, Callable[..., Any]]:
    """Functions that copy between host and device."""
    of_tensor = torch.Tensor

    def to(args: Any, kwargs: Any) -> torch.Tensor:
        source, *rest = args
        copied = kwargs.get("copy", False)
        if rest and isinstance(rest[0], torch.Tensor):
            rest = [rest[0].device if not double.is_on_device(rest[0]) else DEVICE, rest[0].dtype]
        words = {k: v for k, v in kwargs.items() if k != "copy"}
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*rest, **words)
        found = DEVICE if double.is_on_device(source) else HOST
        wanted = found if device is None else device
        if wanted.type == found.type or wanted.type == "meta":
            kwargs = {"dtype": dtype or source.dtype, "copy": copied}
            kwargs |= {"memory_format": memory_format} if memory_format is not None else {}
            kwargs |= {"device": wanted} if wanted.type == "meta" else {}
            return double.run(of_tensor.to, (source,), kwargs)
        return _transfer(double, source, dtype or source.dtype, wanted, non_blocking)

    def cpu(args: Any, kwargs: Any) -> torch.Tensor:
        return to((args[0], HOST), kwargs)

    def cuda(args: Any, kwargs: Any) -> torch.Tensor:
        return to((args[0], DEVICE), {k: v for k, v in kwargs.items() if k == "non_blocking"})

    def copy_(args: Any, kwargs: Any) -> torch.Tensor:
        target, source = args[:2]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        to_device, from_device = double.is_on_device(target), double.is_on_device(source)
        if to_device == from_device:
            return double.run(of_tensor.copy_, args, kwargs)
        _wait_if_blocking(double, source, target, non_blocking)
        if to_device:
            return double.run_across(of_tensor.copy_, (target, source))
        if non_blocking and double.is_pinned(target):
            double.arriving.append((target, source.clone()))
            return target
        return of_tensor.copy_(target, source)

    return {of_tensor.to: to, of_tensor.cpu: cpu, of_tensor.cuda: cuda, of_tensor.copy_: copy_}


def _transfer(
    double: DeviceDouble,
    source: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    non_blocking: bool,
) -> torch.Tensor:
    """A copy on the other side."""
    target = torch.empty_like(source, dtype=dtype)
    if device.type == "cuda":
        double.mark(target)
        _wait_if_blocking(double, source, target, non_blocking)
        return double.run_across(torch.Tensor.copy_, (target, source))
    if not non_blocking:
        double.wait("copy to the host")
        return target.copy_(source)
    if double.recorder is not None:
        raise DeviceError(f"a CUDA graph copies to the host, at {caller()}")
    double.pin(target)  # as torch does
    _fill_with_rubbish(target)
    double.arriving.append((target, source.clone()))
    return target


def _wait_if_blocking(
    double: DeviceDouble, source: torch.Tensor, target: torch.Tensor, non_blocking: bool
) -> None:
    """The host waits for a copy unless it is asked not to, and its side is pinned and dense."""
    on_host = source if double.is_on_device(target) else target
    if on_host.numel() == 0:
        return
    if not non_blocking:
        double.wait("copy between host and device")
    elif not double.is_pinned(on_host):
        double.wait("non_blocking copy of host memory that is not pinned")


def _fill_with_rubbish(tensor: torch.Tensor) -> None:
    """Numbers that nothing expects: copies that have not arrived are not to be read."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _indexing(double: DeviceDouble) -> dict[_Function, Callable[..., Any]]:
    """Indexing, where host tensors may stand in the brackets, and masks make the host wait."""
    of_tensor = torch.Tensor

    def check(args: Any) -> None:
        if not double.is_on_device(args[0]):
            return
        indices = list(tensors_in(args[1])) if len(args) > 1 else []
        if isinstance(args[1], list) or any(
            index.dim() and not double.is_on_device(index) for index in indices
        ):
            double.wait("indexing by a host tensor")
        is_filled = len(args) > 2 and not isinstance(args[2], torch.Tensor)
        if not is_filled and any(index.dtype is torch.bool for index in indices):
            double.wait("indexing by a mask")

    def getitem(args: Any, kwargs: Any) -> torch.Tensor:
        check(args)
        return double.run_across(of_tensor.__getitem__, args)

    def setitem(args: Any, kwargs: Any) -> None:
        check(args)
        if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].dim():
            to_device, from_device = map(double.is_on_device, (args[0], args[2]))
            if to_device != from_device:
                double.wait("assignment between host and device")
        double.run_across(of_tensor.__setitem__, args)

    def repeat_interleave(args: Any, kwargs: Any) -> torch.Tensor:
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
        is_read = isinstance(repeats, torch.Tensor) and double.is_on_device(repeats)
        if is_read and kwargs.get("output_size") is None:
            double.wait("repeat_interleave without its output's size")
        return double.run(torch.repeat_interleave, args, kwargs)

    return {
        of_tensor.__getitem__: getitem,
        of_tensor.__setitem__: setitem,
        of_tensor.repeat_interleave: repeat_interleave,
        torch.repeat_interleave: repeat_interleave,
    }


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def device_of(wanted: object) -> torch.device:
    """Device that an argument names."""
    if isinstance(wanted, int):
        return torch.device("cuda", wanted)
    return wanted if isinstance(wanted, torch.device) else torch.device(str(wanted))


def caller() -> str:
    """Innermost line of vLLM's or ours that is being run, from its package on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("/vllm_choreo/", "/vllm/"):
            if package in path:
                short = path[path.rindex(package) + 1 :]
                return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def _keep(among: dict[int, StorageWeakRef], storage: torch.UntypedStorage) -> None:
    # A weak reference keeps the address from being given to another storage.
    if storage._cdata not in among:
        among[storage._cdata] = StorageWeakRef(storage)


def _qualified(func: _Function) -> str:
    """Name of a custom operation with its namespace; of anything else, nothing."""
    if isinstance(func, torch._ops.OpOverload):
        return str(func._schema.name)
    return str(getattr(func, "_qualified_op_name", ""))
