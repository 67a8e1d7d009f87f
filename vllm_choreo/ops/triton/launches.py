# SPDX-License-Identifier: Apache-2.0
"""Launches that are laid out once for all layers that look alike, and for later steps of a plan.

A launch has about 60 arguments. All but a few are those of the plan or of the model: those few say
where tensors of the layer and of the step lie. Triton finds the compiled kernel by looking at each
argument; `LayerLaunches` has that done for the first layer, and gives those after it, by their
addresses, to the kernel that was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

# Triton compiles other kernels for tensors that do not begin at multiples of this.
_ALIGNMENT = 16
# By all that a kernel is compiled for.
_compiled: dict[tuple[object, ...], CompiledKernel] = {}


class Moving(NamedTuple):
    """Tensors that may lie elsewhere in each layer or step."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    table: torch.Tensor
    own_tokens: torch.Tensor


@dataclass(eq=False)
class KernelLaunch:
    """One kernel's launch, as for the first layer.

    Attributes:
        args: arguments by position, those of the first layer and step in their places.
        places: by index in `args`, the name of an argument of `Moving`.
        constants, options: keyword arguments, of the kernel and of its compilation.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: list[Any]
    places: Mapping[int, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def launch(self, moving: Moving) -> CompiledKernel | None:
        """Launch as Triton does; returns the kernel, None in its interpreter."""
        for at, name in self.places.items():
            self.args[at] = getattr(moving, name)
        found = self.kernel[self.grid](*self.args, **self.constants, **self.options)
        return found if isinstance(found, CompiledKernel) else None

    def key(self) -> tuple[object, ...]:
        """All that the kernel is compiled for, or more: numbers of all kinds by their values."""
        args = (
            (arg.dtype, arg.data_ptr() % _ALIGNMENT == 0) if isinstance(arg, torch.Tensor) else arg
            for arg in self.args
        )
        constants, options = tuple(self.constants.values()), tuple(self.options.items())
        return self.kernel, self.args[0].device, tuple(args), constants, options


class _Prepared:
    """A launch whose kernel is known."""

    def __init__(self, launch: KernelLaunch, compiled: CompiledKernel) -> None:
        self._compiled = compiled
        self._grid = (*launch.grid, 1, 1)[:3]
        # Addresses, then constants, in the order of the kernel's signature.
        args = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch.args]
        names = launch.kernel.arg_names[len(args) :]
        args += [launch.constants[name] for name in names]
        self._places = [
            (at, Moving._fields.index(name))
            for at, name in launch.places.items()
            if args[at] is not None
        ]
        self._run = compiled.run  # this loads the kernel, and so sets what it is told
        before = (*self._grid, 0, compiled.function, compiled.packed_metadata, None, None, None)
        self._call = [*before, *args]
        self._places = [(len(before) + at, index) for at, index in self._places]

    def launch(self, moving: Sequence[int | None], stream: int, has_hooks: bool) -> None:
        """Launch as the compiled kernel does that is called with a grid, in a third of its time."""
        call = self._call
        call[3] = stream
        for at, index in self._places:
            call[at] = moving[index]
        if has_hooks:
            self._compiled[self._grid](*call[9:], stream=stream)
        else:
            self._run(*call)


def _stream() -> int:
    """Stream of the current device in which kernels are launched now."""
    driver = triton.runtime.driver.active
    stream: int = driver.get_current_stream(driver.get_current_device())
    return stream


def _has_hooks() -> bool:
    """Return whether somebody, such as a profiler, wants to be told of launches."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)  # they are chains of hooks


class LayerLaunches:
    """Launches of layers that look alike; made by the first of them, which is launched.

    Args:
        launches: those of the first layer, in their order.
        moving: its tensors.
        kv_cache: its cache, of which keys and values are parts.

    Attributes:
        is_prepared: True if the kernels are known: other layers are launched by their addresses,
            else by their tensors.
    """

    def __init__(
        self, launches: Sequence[KernelLaunch], moving: Moving, kv_cache: torch.Tensor
    ) -> None:
        self._launches = launches
        self._keys_at = moving.keys.data_ptr() - kv_cache.data_ptr()
        self._values_at = moving.values.data_ptr() - kv_cache.data_ptr()
        self._prepared: list[_Prepared] = []
        for launch in launches:
            key = launch.key()
            compiled = _compiled.get(key)
            if compiled is None:
                compiled = launch.launch(moving)
                if compiled is None:  # in the interpreter
                    continue
                _compiled[key] = compiled
                self._prepared.append(_Prepared(launch, compiled))
            else:
                self._prepared.append(_Prepared(launch, compiled))
                addresses = [None if t is None else t.data_ptr() for t in moving]
                self._prepared[-1].launch(addresses, _stream(), _has_hooks())
        self.is_prepared = len(self._prepared) == len(launches)
        for launch in launches:  # what the plan owns has to live as long as this, no more
            launch.args = [None if at in launch.places else x for at, x in enumerate(launch.args)]

    def launch(self, moving: Moving) -> None:
        """Launch for another layer, by its tensors."""
        for launch in self._launches:
            launch.launch(moving)

    def launch_at(
        self,
        query: int,
        kv_cache: int,
        output: int,
        of_layer: tuple[int | None, int | None],
        of_step: tuple[int, int],
    ) -> None:
        """Launch for another layer, by where its tensors lie.

        Args:
            of_layer, of_step: addresses of slopes and sinks; of block table and own tokens.
        """
        if not self._prepared:
            return  # all queries are run in other ways
        keys, values = kv_cache + self._keys_at, kv_cache + self._values_at
        moving = (query, keys, values, output, *of_layer, *of_step)
        stream, has_hooks = _stream(), _has_hooks()
        for launch in self._prepared:
            launch.launch(moving, stream, has_hooks)
