# SPDX-License-Identifier: Apache-2.0
"""What a drafter with layers sees of calls: short texts of their own in the null block."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_choreo.engine.worker.drafting import CallsAlone


def _metadata() -> CommonAttentionMetadata:
    """An ordinary request that decodes, a call with three tokens, another with one."""
    starts = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    seq_lens = torch.tensor([40, 99, 70], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        num_reqs=3,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=99,
        block_table_tensor=torch.tensor([[5, 6, 0], [7, 8, 9], [7, 4, 3]], dtype=torch.int32),
        slot_mapping=torch.tensor([198, 199, 291, 292, 293, 100]),
    )


def test_calls_lie_nowhere_and_ordinary_requests_where_they_did() -> None:
    given = _metadata()
    alone = CallsAlone.of(given, [False, True, True], 2)
    seen = alone.metadata
    assert seen.seq_lens.tolist() == seen.seq_lens_cpu_upper_bound.tolist() == [40, 3, 1]
    assert seen.max_seq_len == 40
    assert seen.block_table_tensor.tolist() == [[5, 6, 0], [0, 0, 0], [0, 0, 0]]
    assert seen.slot_mapping.tolist() == [198, 199, 0, 1, 0, 0]  # of blocks of 2
    assert seen.compute_num_computed_tokens().tolist() == [38, 0, 0]
    for name in ("seq_lens", "block_table_tensor", "slot_mapping", "max_seq_len"):
        assert torch.equal(
            torch.as_tensor(getattr(given, name)), torch.as_tensor(getattr(_metadata(), name))
        )


def test_calls_stand_at_their_indices() -> None:
    alone = CallsAlone.of(_metadata(), [False, True, True], 2)
    positions = torch.tensor([38, 39, 900, 901, 902, 69])
    assert alone.place(positions, 6).tolist() == [38, 39, 0, 1, 2, 0]
    chosen = torch.tensor([1, 4, 5])
    assert alone.place(positions[chosen], chosen).tolist() == [39, 2, 0]
    rows = positions.expand(3, -1)  # M-RoPE
    assert alone.place(rows, 6).tolist() == [[38, 39, 0, 1, 2, 0]] * 3
