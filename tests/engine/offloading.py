# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading connector for engines on CPU: what it copies with is for GPUs alone.

`LateCopies` copies as late as the connector's contract permits: what it takes out of blocks too
late, or puts into them too late, shows.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

# For `LLM(kv_transfer_config=...)`.
OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "LateOffloadingSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 64 * 2**20,
        "offload_prompt_only": False,
    },
}


class LateCopies(OffloadingWorker):
    """Copies between the KV cache and tensors, each done when it is waited for or two steps old.

    Attributes:
        num_stored, num_loaded: blocks copied so far.
    """

    num_stored = num_loaded = 0

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._stored = [t.new_zeros((num_chunks, t.shape[1])) for t in self._tensors]
        self._jobs: dict[int, tuple[bool, list[int], list[int]]] = {}
        self._ages: dict[int, int] = {}
        self._done: list[TransferResult] = []

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(
        self, job_id: int, is_store: bool, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        self._jobs[job_id] = is_store, blocks.block_ids.tolist(), chunks.block_ids.tolist()
        self._ages[job_id] = 0
        return True

    def _run(self, job_id: int) -> None:
        is_store, blocks, chunks = self._jobs.pop(job_id)
        del self._ages[job_id]
        self.num_stored += len(blocks) * is_store
        self.num_loaded += len(blocks) * (not is_store)
        for cache, stored in zip(self._tensors, self._stored, strict=True):
            if is_store:
                stored[torch.tensor(chunks)] = cache[torch.tensor(blocks)]
            else:
                cache[torch.tensor(blocks)] = stored[torch.tensor(chunks)]
        self._done.append(TransferResult(job_id, success=True))

    @override
    def get_finished(self) -> list[TransferResult]:
        for job_id in list(self._jobs):
            self._ages[job_id] += 1
            if self._ages[job_id] > 2:
                self._run(job_id)
        done, self._done = self._done, []
        return done

    @override
    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            self._run(job_id)


def copies() -> LateCopies:
    """The copies of the engine that runs in this process."""
    worker = get_kv_transfer_group().connector_worker.worker
    assert isinstance(worker, LateCopies)
    return worker


class LateOffloadingSpec(CPUOffloadingSpec):
    """vLLM's offloading to host memory, whose manager it is, with another worker."""

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return LateCopies(kv_caches, self.num_chunks)
