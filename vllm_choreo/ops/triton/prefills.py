# SPDX-License-Identifier: Apache-2.0
"""Long prefills by FlashAttention: copies of queries, its calls, and the merge of what they say."""

from __future__ import annotations

import math

import torch
import triton

from vllm_choreo.ops.flash_prefills import FlashPrefills, PrefillRound, Sequences, prefill_row_bytes
from vllm_choreo.ops.layout import key_view, value_view
from vllm_choreo.ops.plan import LayerAttention, SpanPlan
from vllm_choreo.ops.triton.kernels import copy_queries, merge_partials

# Copies of a program of `copy_queries`.
_NUM_ROWS = 16


def attend_prefills(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: SpanPlan,
    layer: LayerAttention,
) -> None:
    """Run ``vllm_choreo.ops.span_attention`` for the plan's `prefills`, if it has any.

    The layer has neither window nor sinks nor slopes, and its cache is not quantized or latent.
    """
    if plan.prefills is None:
        return
    keys, values = (view(kv_cache, layer.layout).transpose(1, 2) for view in (key_view, value_view))
    for one in plan.prefills.rounds:
        part = _LayerRound(one, plan.prefills, query, plan.workspace)
        part.run(keys, values, output, plan, layer)


class _LayerRound:
    """A round in a layer: copies, partial outputs and log-sum-exps in the plan's workspace."""

    def __init__(
        self,
        one: PrefillRound,
        prefills: FlashPrefills,
        query: torch.Tensor,
        workspace: torch.Tensor | None,
    ) -> None:
        _, num_heads, head_size = query.shape
        self._one, self._attention, self._query = one, prefills.attention, query
        sizes = [one.num_copies * num_heads * head_size, one.num_rows * num_heads * head_size]
        num_bytes = one.num_rows * prefill_row_bytes(num_heads, head_size, query.itemsize)
        if workspace is None:
            workspace = query.new_empty(-(-num_bytes // 4), dtype=torch.float32)
        numbers = workspace.view(query.dtype)
        self._copies, self._partials = (
            part.view(-1, num_heads, head_size) for part in numbers[: sum(sizes)].split(sizes)
        )
        num_lse = one.num_rows * num_heads
        self._lse = workspace[-num_lse:].view(-1, num_heads)

    def run(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        plan: SpanPlan,
        layer: LayerAttention,
    ) -> None:
        """Write the output of the round's queries.

        Args:
            keys, values: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        """
        one, num_copies = self._one, self._one.num_copies
        if one.parents is not None:
            self._copy(plan.cos_sin, layer)
            self._attend(self._copies, keys, values, one.parents, slice(num_copies), layer)
        queries = self._query[one.first_query : one.end_query]
        self._attend(queries, keys, values, one.own, slice(num_copies, None), layer)
        merge_partials[(one.merged_query.numel(), output.shape[1])](
            *(output, *output.stride()[:2], self._partials, self._lse),
            *(one.merged_query, one.partial_start_loc, one.partial, None, None, None, None),
            VALUE_SIZE=output.shape[2],
            PADDED_VALUE_SIZE=triton.next_power_of_2(output.shape[2]),
            HAS_SINKS=False,
            HAS_TEMPERATURE=False,
            num_warps=1,
        )

    def _copy(self, cos_sin: torch.Tensor | None, layer: LayerAttention) -> None:
        one, query = self._one, self._query
        rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
        copy_queries[(triton.cdiv(one.num_copies, _NUM_ROWS), query.shape[1])](
            *(query, *query.stride()[:2], self._copies),
            *(one.copied_query, one.copied_span, one.num_copies, cos_sin),
            NUM_ROWS=_NUM_ROWS,
            NUM_HEADS=query.shape[1],
            HEAD_SIZE=query.shape[2],
            PADDED_HEAD_SIZE=triton.next_power_of_2(query.shape[2]),
            ROTARY_DIM=rotary_dim,
            IS_NEOX=layer.is_neox,
            RUN=math.gcd(rotary_dim // 2, 16),
        )

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequences: Sequences,
        rows: slice,
        layer: LayerAttention,
    ) -> None:
        """Have FlashAttention write rows of partial outputs, and keep their log-sum-exps."""
        _, lse = self._attention(
            q=queries,
            k=keys,
            v=values,
            out=self._partials[rows],
            cu_seqlens_q=sequences.query_start_loc,
            max_seqlen_q=sequences.max_queries,
            seqused_k=sequences.num_tokens,
            max_seqlen_k=sequences.max_tokens,
            block_table=sequences.block_table,
            softmax_scale=layer.scale,
            causal=sequences is self._one.own,
            softcap=layer.softcap,
            return_softmax_lse=True,
        )
        # Ours are of base two.
        torch.mul(lse.T, math.log2(math.e), out=self._lse[rows])
