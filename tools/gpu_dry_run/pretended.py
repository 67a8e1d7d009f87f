# SPDX-License-Identifier: Apache-2.0
"""A CUDA platform that is not there: vLLM's own class of it, told which GPU it has.

`pretend` comes before vLLM is imported, for vLLM decides then what it runs on. What CUDA builds of
vLLM have compiled and this one has not is given a stand-in of that name, and every stand-in that a
run meets is noted (`seams.py`): what no test but this one covers without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tools.gpu_dry_run import kernels, streams
from tools.gpu_dry_run.device import DeviceDouble
from tools.gpu_dry_run.gpus import Gpu

_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
# Compiled modules of a CUDA build. Their operations are those of vLLM's CPU build where these have
# the same name, else those of `kernels.py`.
_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


def pretend(gpu: Gpu, **environment: str) -> DeviceDouble:
    """Have this process's vLLM believe that it is a CUDA build on `gpu`.

    Args:
        environment: variables that vLLM reads when it is imported.

    Returns:
        The device, which is there while it is on.

    Raises:
        RuntimeError: vLLM is imported already.
    """
    if "vllm.platforms" in sys.modules:
        raise RuntimeError("vLLM is imported: pretend a GPU in a process of its own")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)
    os.environ.pop("VLLM_TARGET_DEVICE", None)
    for name in _COMPILED:
        sys.modules[name] = ModuleType(name)
    _pretend_torch(gpu)
    _pretend_triton()
    _stand_in_for_packages()
    double = DeviceDouble()
    streams.install(double)  # vLLM keeps some of torch's functions when it is imported
    import vllm.platforms as platforms

    matches = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda part: part != "cpu" and matches(part)
    platforms._current_platform = platform = _platform_of(gpu)
    platform.import_kernels()  # before the stand-ins: it says what is there already
    kernels.install(double)
    importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").FA4_AVAILABLE = True
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()  # another process would pretend nothing
    return double


def _platform_of(gpu: Gpu) -> Any:
    """vLLM's CUDA platform without NVML, whose answers are those of `gpu`."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedCudaPlatform(NonNvmlCudaPlatform):
        dist_backend = "gloo"  # of one process: it sends nothing

        @classmethod
        def import_kernels(cls) -> None:
            CpuPlatform.import_kernels()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.memory_gib << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.num_multiprocessors

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    return PretendedCudaPlatform()


def _pretend_torch(gpu: Gpu) -> None:
    """Let torch tell what it would of the GPU."""
    from types import SimpleNamespace

    import torch

    major, minor = gpu.capability
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.num_multiprocessors,
        total_memory=gpu.memory_gib << 30,
        is_integrated=0,
        warp_size=32,
    )
    torch.version.cuda = "13.0"
    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_device_properties": properties,
    }.items():
        setattr(torch.cuda, name, _answering(answer))
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device_index": 0,
        "current_accelerator": torch.device("cuda"),
    }.items():
        setattr(torch.accelerator, name, _answering(answer))


def _answering(answer: object) -> Any:
    return lambda *args, **kwargs: answer


def _pretend_triton() -> None:
    """Triton has one active driver; its kernels run in its interpreter."""
    from triton.backends import backends
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    class HostDriver(DriverBase):
        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cuda", 0)

        def get_benchmarker(self) -> None:
            return None

    nvidia = backends["nvidia"]
    backends["nvidia"] = type(nvidia)(compiler=nvidia.compiler, driver=HostDriver)
    driver.set_active(HostDriver())


def _stand_in_for_packages() -> None:
    """Let packages be imported that vLLM's CUDA builds come with."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # it remembers the answer: transformers is to do without
    sys.meta_path.append(_Packages())


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose names can be imported, and whose functions nothing here runs."""

    names = ("flashinfer", "torchvision")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _never_run(f"{spec.name}.{name}")  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _never_run(name: str) -> type:
    """Stand-in for a class or function of a package that is not there."""
    short = name.rpartition(".")[2]
    if short.startswith("__"):
        raise AttributeError(name)

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} is not there in a dry run")

    return type(short, (), {"__init__": refuse, "run": refuse})  # vLLM looks at what `run` takes
