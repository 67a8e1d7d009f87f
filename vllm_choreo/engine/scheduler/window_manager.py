# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of a KV cache group with a sliding window, in which requests may be calls.

vLLM counts a window back from a request's end by virtual indices. A call sees its parents
elsewhere: what it reads of them is in its block table from the start (`CallBlocks.of_parents`),
with null blocks for what it does not see. Of its own tokens it lets go as vLLM does.

vLLM chooses managers by the class of a group's specification (`KVCacheSpecRegistry`), or by its
role. Neither fits: a class would have to be registered in every process before the first group is
made, and ours need the call table, which comes later. So the scheduler changes the class of vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

from vllm_choreo.engine.scheduler.call_table import CallTable


class CallWindowManager(SlidingWindowManager):
    """Manager of a group with a window, which skips nothing of what a call reads."""

    call_table: CallTable
    _skips_nothing = False  # while it does something for a call

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0 if self._skips_nothing else super().get_num_skipped_tokens(num_computed_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        call = self.call_table.calls.get(request_id)
        with nullcontext() if call is None else self._skipping_nothing():
            num_blocks = super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                # A cap on the whole table: what a call reads is in its table already.
                apply_admission_cap and call is None,
                prefill_end,
            )
        cap = self.max_admission_blocks_per_request
        is_capped = apply_admission_cap and call is not None and not call.encoding.is_kept_whole
        return min(num_blocks, cap) if is_capped and cap is not None else num_blocks

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        is_call = request_id in self.call_table.calls
        with self._skipping_nothing() if is_call else nullcontext():
            super().add_local_computed_blocks(
                request_id,
                new_computed_blocks,
                num_local_computed_tokens,
                num_external_computed_tokens,
            )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        call = self.call_table.calls.get(request_id)
        if call is None:
            super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)
        elif request_id in self.req_to_blocks:
            group = self.kv_cache_group_id
            behind = self.call_table.blocks.left_behind(call, processed_computed_tokens, group)
            self._remove_blocks_in_range(request_id, behind.start, behind.stop)

    @contextmanager
    def _skipping_nothing(self) -> Iterator[None]:
        self._skips_nothing = True
        try:
            yield
        finally:
            self._skips_nothing = False


def keep_windows_of_calls(
    managers: Iterable[SingleTypeKVCacheManager], call_table: CallTable
) -> None:
    """Have the managers of groups with windows keep what calls read."""
    for manager in managers:
        if type(manager) is SlidingWindowManager:
            # vLLM's constructor names its class; the subclass only adds methods.
            manager.__class__ = CallWindowManager
            assert isinstance(manager, CallWindowManager)
            manager.call_table = call_table
