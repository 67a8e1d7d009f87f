# SPDX-License-Identifier: Apache-2.0
"""Prefix cache of ordinary requests in models with states: which states they leave, and find.

vLLM's prefix cache finds keys and values of a prompt's first blocks. A request that reads them
needs the state behind them, too, so a hit ends where one was left. That is at ends of blocks:

    after every so many tokens      nobody knows yet what prompts will have in common
    where a hit of keys has ended   two prompts part there, and more may follow

the second as Marconi does (https://arxiv.org/abs/2411.19379), and vLLM with
`enable_mamba_shared_prefix_checkpoint`. A step that would run beyond such a place ends there, and
the request goes on with a copy. What it leaves is free, and found by vLLM's hash of the block until
somebody takes it, the least recently used first. No message gives way to it, but for one that two
prompts have asked for. Who would find what a request of the same step is about to leave, starts in
the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_choreo.engine.scheduler.call_table import CallTable

# States that one request may leave take a quarter of those that as many tokens have.
_STATES_APART = 4


class PrefixStates:
    """States at ends of blocks of ordinary requests' tokens, by vLLM's hashes of these blocks.

    Args:
        call_table: calls of an engine with states.
        pool: the pool of its states, with caching.
        tokens_per_state: tokens of the KV cache for each state.
    """

    def __init__(self, call_table: CallTable, pool: BlockPool, tokens_per_state: int) -> None:
        assert call_table.store.states is not None and pool.enable_caching
        self._call_table, self._states, self._pool = call_table, call_table.store.states, pool
        self._block_size = pool.hash_block_size
        blocks_apart = _STATES_APART * tokens_per_state // self._block_size
        self._interval = max(blocks_apart, 1) * self._block_size
        # Of blocks behind which a request's step ends, and the first such request.
        self._coming: dict[BlockHash, str] = {}

    def begin_step(self) -> None:
        """Begin the planning of a step."""
        self._coming.clear()

    def is_coming(self, request: Request, num_found: int) -> bool:
        """Return whether a request finds more in the next step than its first `num_found` tokens.

        vLLM has asked for its hit before.
        """
        ends = range(request.shared_prefix_boundary, num_found, -self._block_size)
        of_others = (self._coming.get(self._hash(request, end)) for end in ends)
        return any(by and by != request.request_id for by in of_others)

    def _hash(self, request: Request, num_tokens: int) -> BlockHash:
        """The hash of the last of the whole blocks that so many first tokens are; else empty."""
        number = num_tokens // self._block_size - 1
        is_known = 0 <= number < len(request.block_hashes)
        return request.block_hashes[number] if is_known else BlockHash(b"")

    def find(self, request: Request, num_tokens: int) -> KVCacheBlock | None:
        """State behind the first tokens of a request, whole blocks; None: there is none."""
        found = self._pool.get_cached_block(self._hash(request, num_tokens), [0])
        return found[0] if found else None

    def longest(self, request: Request, num_tokens: int) -> int:
        """Number of the first tokens, `num_tokens` at most, behind which there is a state."""
        ends = range(num_tokens, 0, -self._block_size)
        return next((end for end in ends if self.find(request, end) is not None), 0)

    def end_of_chunk(self, request: Request, start: int, end: int) -> int:
        """Where a step ends that would run the tokens from `start` to `end` of a request."""
        if start >= request.num_tokens - 1:
            return end  # it generates
        stops = ((end - 1) // self._interval * self._interval, request.shared_prefix_boundary)
        end = min((stop for stop in stops if start < stop < end), default=end)
        if self._is_left(request, end) and (block_hash := self._hash(request, end)):
            self._coming.setdefault(block_hash, request.request_id)
        return end

    def _is_left(self, request: Request, end: int) -> bool:
        """Return whether a request leaves its state behind so many tokens."""
        is_at_distance = end > 0 and end % self._interval == 0
        return is_at_distance or 0 < end == request.shared_prefix_boundary

    def leave(self, request: Request) -> None:
        """Leave the state of a request that runs, if it has come to where one is to be found."""
        end = request.num_computed_tokens
        if not self._is_left(request, end):
            return
        is_shared = end == request.shared_prefix_boundary
        number = end // self._block_size
        # Tokens that were sampled in steps under way have no hash yet.
        if number > len(request.block_hashes) or self.find(request, end) is not None:
            return
        if not (self._states.num_free or (is_shared and self._take_from_messages())):
            return
        left = self._states.leave(request.request_id)
        blocks = [self._pool.null_block] * (number - 1) + [self._pool.blocks[left.block_id]]
        self._pool.cache_full_blocks(request, blocks, number - 1, number, self._block_size, 0)

    def _take_from_messages(self) -> bool:
        """Have the message that goes first give up its state; false: none may."""
        store, needed = self._call_table.store, next(self._call_table.states.needed(None))
        victim = self._states.victim(needed, store.clock())
        is_idle = victim is not None and not victim.is_pinned(store.clock())
        return is_idle and store.evict_state(needed) and bool(self._states.num_free)

    def take(self, request: Request, num_tokens: int) -> KVCacheBlock | None:
        """Find the state behind the first tokens of a request, and hold it."""
        state = self.find(request, num_tokens)
        if state is not None:
            self._pool.touch([state])
        return state

    def start(self, request: Request, state: KVCacheBlock, has_room: bool) -> None:
        """Start a request behind a state, which is held.

        Args:
            has_room: whether another state is free; else the request starts in this one.
        """
        if has_room:
            self._states.start(request.request_id, state)
            self._states.let_go(state)
        else:
            self._pool.evict_blocks({state.block_id})
            self._states.adopt(request.request_id, state)

    def clear(self) -> None:
        """Forget all states that requests have left."""
        self._pool.evict_blocks({block.block_id for block in self._pool.blocks})
