# SPDX-License-Identifier: Apache-2.0
"""The message store of an engine, and the memories beside it, sized by the configuration."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine.kv_cache import block_bytes, windows_of_groups
from vllm_choreo.engine.query_scaling import scales_queries
from vllm_choreo.kv_dtype import kv_dtype
from vllm_choreo.store.hidden import HiddenStateIndex
from vllm_choreo.store.host_tier import HostTier
from vllm_choreo.store.pictures import PictureMemory
from vllm_choreo.store.session_copies import SessionCopies
from vllm_choreo.store.states import States
from vllm_choreo.store.store import MessageStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class StoreMaker:
    """Maker of an engine's message store.

    Attributes:
        vllm_config: the engine's configuration.
        config: our settings in it.
        kv_cache_config: vLLM's KV cache groups, and how many blocks there are.
        block_size: tokens of a block.
    """

    vllm_config: VllmConfig
    config: ChoreoConfig
    kv_cache_config: KVCacheConfig
    block_size: int

    def make(self, pool: BlockPool) -> MessageStore:
        """Make an empty store.

        Args:
            pool: blocks of the KV cache.
        """
        config = self.config
        store = MessageStore(
            pool,
            self.block_size,
            self._signature(),
            is_placed=scales_queries(self.vllm_config.model_config.hf_text_config),
            session_copies=SessionCopies(
                config.max_copies_per_session, config.max_copied_tokens_per_session
            ),
            states=self._states(),
            windows=windows_of_groups(self.kv_cache_config),
        )
        if num_blocks := self._num_host_blocks:
            store.tier = HostTier(num_blocks, store.residency.block_copies)
        store.hidden = self._hidden_index()
        store.pictures = self._picture_memory()
        return store

    @property
    def _num_host_blocks(self) -> int:
        # Per worker: the specification is that of one worker's share of the heads.
        return self.config.num_host_blocks(block_bytes(self.kv_cache_config))

    def _signature(self) -> bytes:
        """Bytes of the model, its dtypes and rotation, which all keys and values depend on."""
        model = self.vllm_config.model_config
        rotation = getattr(model.hf_text_config, "rope_parameters", None)
        parts = (model.model, model.revision, model.dtype, kv_dtype(self.vllm_config), rotation)
        return repr(parts).encode()

    def _states(self) -> States | None:
        if not self.vllm_config.model_config.is_hybrid:
            return None
        num_states = self.config.num_states(self.kv_cache_config.num_blocks * self.block_size)
        pool = BlockPool(num_states, enable_caching=True, hash_block_size=self.block_size)
        num_in_host = self._num_host_blocks * self.block_size // self.config.tokens_per_state
        return States(pool, num_in_host, self.config.composed_states)

    def _hidden_index(self) -> HiddenStateIndex | None:
        model, max_bytes = self.vllm_config.model_config, self.config.hidden_bytes
        if not max_bytes:
            return None
        num_layers = model.hf_text_config.num_hidden_layers
        row_bytes = model.get_hidden_size() * model.dtype.itemsize
        return HiddenStateIndex(num_layers, row_bytes, self.block_size, max_bytes)

    def _picture_memory(self) -> PictureMemory | None:
        max_bytes, share = self.config.picture_bytes, self.config.tenant_share
        return PictureMemory(max_bytes, int(share * max_bytes), gc.collect) if max_bytes else None
