# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager, in which a request may start on blocks of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.key_mover import KeyMover
from vllm_choreo.engine.scheduler.prefix_states import PrefixStates
from vllm_choreo.store.groups import Blocks


class ChoreoKVCacheManager(KVCacheManager):
    """KV cache manager that starts calls on messages' blocks, and evicts messages for room."""

    call_table: CallTable
    mover: KeyMover | None  # None: queries are rotated, keys never move
    prefix_states: PrefixStates | None = None  # None: the model has no states
    drop_idle: Callable[[], None]  # drops all messages' keys and values that nobody reads
    runs_alone: Callable[[Request], bool]  # whether no other request runs

    def get_computed_blocks(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int]:
        # From vLLM 0.33 on a bound may follow, for engines that hand out hidden states.
        call = self.call_table.calls.get(request.request_id)
        if call is None:
            found = super().get_computed_blocks(request, *args, **kwargs)
            return self._up_to_a_state(request, *found) if self.prefix_states else found
        if call.run is not None:  # its slots exist; it adopts all blocks when it is scheduled
            return self.empty_kv_cache_blocks, self.call_table.blocks.of_run(call)[1], 0
        self.call_table.share_duplicate(call)
        read = [self.mover.place(call)] if self.mover else self.call_table.blocks.of_parents(call)
        own = self.call_table.blocks.of_itself(call)
        blocks = tuple([*parents, *rest] for parents, rest in zip(read, own, strict=True))
        num_tokens = len(blocks[0]) * self.call_table.block_size
        return self.create_kv_cache_blocks(blocks), num_tokens, 0

    def _up_to_a_state(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int, shared: int
    ) -> tuple[KVCacheBlocks, int, int]:
        """Cut a hit of the prefix cache to where a state lies; what is beyond is shared, too."""
        assert self.prefix_states is not None
        num_usable = self.prefix_states.longest(request, num_tokens)
        if num_usable == num_tokens:
            return blocks, num_tokens, shared
        return self.truncate_computed_blocks(blocks, num_usable), num_usable, num_tokens

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Extend vLLM's method: evict messages that nobody reads when the pool runs short."""
        call = self.call_table.calls.get(request.request_id)
        if call is not None:
            # vLLM hashes and registers blocks here unless told that they are not written yet.
            kwargs["delay_cache_blocks"] = True
        starting = call if call is not None and not call.is_scheduled else None
        # With nothing else running, waiting calls would wait for one another: take from the last.
        is_waiting = "has_scheduled_reqs" in kwargs
        is_alone = not kwargs["has_scheduled_reqs"] if is_waiting else self.runs_alone(request)
        states = self.call_table.store.states
        is_stateless = states is not None and states.find(request.request_id) is None
        if is_stateless and not self._start_state(request, num_new_computed_tokens, is_alone):
            return None
        if self.prefix_states and call is None and not is_stateless:
            self.prefix_states.leave(request)
        if starting and starting.run is not None:
            self.inherit(request, self.call_table.blocks.of_run(starting)[0])
        while True:
            blocks = super().allocate_slots(
                request, num_new_tokens, num_new_computed_tokens, **kwargs
            )
            if blocks is not None:
                break
            if starting and self.mover and (read := self.mover.withdraw_copies(starting)):
                own = kwargs["new_computed_blocks"].blocks[0][len(read) :]
                kwargs["new_computed_blocks"] = self.create_kv_cache_blocks(([*read, *own],))
            elif call is not None and self.call_table.blocks.give_up_gaps(call):
                continue
            elif not self.call_table.store.evict_one(call.needed() if call else (), is_alone):
                break
        if blocks is None and starting and starting.run is not None:
            self.free(request)
        if blocks is None and is_stateless:
            self._release_state(request)  # it holds none while it waits
        if call is not None and blocks is not None:
            if self.mover and starting and starting.run is None:
                self.mover.commit(call)
            up_to = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
            self.call_table.on_scheduled(call, self.get_blocks(request.request_id).blocks, up_to)
        return blocks

    def _start_state(self, request: Request, num_computed_tokens: int, is_alone: bool) -> bool:
        """Give a request that starts a state; False: there is no room, or soon a better one."""
        store, call = self.call_table.store, self.call_table.calls.get(request.request_id)
        assert store.states is not None and self.prefix_states is not None
        if call is None and self.prefix_states.is_coming(request, num_computed_tokens):
            return False
        found = None if call else self.prefix_states.take(request, num_computed_tokens)
        assert call or found or not num_computed_tokens, "its hit ends where a state lies"
        # Calls that took states from those before them in turn would lose them to these again.
        may_take = is_alone and self.call_table.turns.is_first(request)
        has_room = store.free_a_state(self.call_table.states.needed(call), may_take)
        if found is not None:
            self.prefix_states.start(request, found, has_room)
        elif has_room:
            origin = self.call_table.states.origin(call) if call is not None else None
            store.states.start(request.request_id, origin)
        return has_room or found is not None

    def free(self, request: Request) -> None:
        """Extend vLLM's method: the request's state is free, too, unless a message holds it."""
        super().free(request)
        self._release_state(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Extend vLLM's method, as `free`: what runs after the steps under way waits for them."""
        self._release_state(request)
        return super().pop_blocks_for_free(request)

    def _release_state(self, request: Request) -> None:
        if self.call_table.store.states:
            self.call_table.store.states.release(request.request_id)

    def inherit(self, request: Request, blocks: Blocks) -> None:
        """Give a request, which has none, these blocks, the last ones partly filled, uncopied."""
        for manager, of_group in zip(self.coordinator.single_type_managers, blocks, strict=True):
            self.block_pool.touch(of_group)
            manager.req_to_blocks[request.request_id] = list(of_group)

    def reset_prefix_cache(self) -> bool:
        """Extend vLLM's method, which needs an empty pool: drop idle messages' blocks first."""
        self.drop_idle()
        is_reset = super().reset_prefix_cache()
        if is_reset and self.prefix_states:
            self.prefix_states.clear()
        return is_reset

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Extend vLLM's method: keys and values of calls never enter the prefix cache."""
        if request.request_id not in self.call_table.calls:
            super().cache_blocks(request, num_computed_tokens)
