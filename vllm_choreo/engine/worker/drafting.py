# SPDX-License-Identifier: Apache-2.0
"""Calls as a drafter with layers sees them: short texts of their own that lie nowhere.

vLLM's drafters run over the whole batch. What they would read of a call, they have never encoded,
and where a call is placed they would write into blocks by its positions: into those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

_NULL_BLOCK = 0  # vLLM's, which nobody reads


@dataclass(frozen=True)
class CallsAlone:
    """Batch in which some requests are calls, as a drafter sees it.

    Attributes:
        metadata: vLLM's of the batch, in which every call begins with its tokens of this step, in
            the null block.
        is_call: bool `[num_tokens]`: tokens of calls.
        index: int64 `[num_tokens]`: of each token among those of its request in this step.
    """

    metadata: CommonAttentionMetadata
    is_call: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(
        cls, metadata: CommonAttentionMetadata, calls: Sequence[bool], block_size: int
    ) -> CallsAlone:
        """Show a batch to a drafter.

        Args:
            metadata: vLLM's; not changed.
            calls: whether a request is a call, for each of the batch.
            block_size: slots of the null block, in which all tokens of calls lie.
        """
        rows = torch.tensor(calls, device=metadata.seq_lens.device)
        starts, ends = metadata.query_start_loc[:-1].long(), metadata.query_start_loc[1:].long()
        lengths = ends - starts
        num_tokens = int(metadata.query_start_loc_cpu[-1])
        is_call = rows.repeat_interleave(lengths, output_size=num_tokens)
        index = torch.arange(num_tokens, device=rows.device)
        index -= starts.repeat_interleave(lengths, output_size=num_tokens)

        def shortened(seq_lens: torch.Tensor) -> torch.Tensor:
            of_calls = lengths.to(seq_lens.device, seq_lens.dtype)
            return torch.where(rows.to(seq_lens.device), of_calls, seq_lens)

        slots = metadata.slot_mapping.clone()
        slots[:num_tokens] = torch.where(is_call, index % block_size, slots[:num_tokens])
        bounds = metadata.seq_lens_cpu_upper_bound
        seq_lens = shortened(metadata.seq_lens)
        alone = replace(
            metadata,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=None if bounds is None else shortened(bounds),
            max_seq_len=int((seq_lens if bounds is None else shortened(bounds)).max()),
            block_table_tensor=metadata.block_table_tensor.masked_fill(rows[:, None], _NULL_BLOCK),
            slot_mapping=slots,
            _num_computed_tokens_cache=None,
        )
        return cls(alone, is_call, index)

    def place(self, positions: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
        """Have the tokens of calls stand at their indices.

        Args:
            positions: int `[..., n]`: those of the tokens in the model; not changed.
            tokens: the n tokens: the first ones, or their indices in the batch.
        """
        chosen = slice(tokens) if isinstance(tokens, int) else tokens
        return torch.where(self.is_call[chosen], self.index[chosen].to(positions.dtype), positions)
