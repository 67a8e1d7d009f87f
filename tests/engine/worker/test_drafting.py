# SPDX-License-Identifier: Apache-2.0
"""What a drafter with layers reads of calls: the spans that the model reads, pass by pass."""

from __future__ import annotations

import torch

from vllm_choreo.engine.step import RequestSpans
from vllm_choreo.engine.worker.drafting import DrafterSpans
from vllm_choreo.engine.worker.layer_kinds import LayerKind, LayerShape
from vllm_choreo.engine.worker.span_batcher import SpanBatcher, StepBatch

_KIND = LayerKind(None, LayerShape(2, 1, 8, torch.float32), 64)
# Behind a parent of six tokens, in two blocks of four; its own begin at 8, and are seen at 20.
_CALL = RequestSpans((0,), (6,), (0,), (3,), base=8, shift=12)


def _pass(lengths: list[int], seq_lens: list[int]) -> StepBatch:
    return StepBatch(
        ["text", "call"],
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor([[5, 6, 0, 0], [7, 4, 9, 3]], dtype=torch.int32),
    )


def _spans() -> tuple[SpanBatcher, DrafterSpans]:
    first, following = (SpanBatcher(4, [_KIND], shared_reading=False) for _ in range(2))
    spans = DrafterSpans(first, following)
    spans.update({"call": _CALL}, iter(()), {"call": ((7, 4, 9),)})
    return first, spans


def test_every_pass_reads_the_parents_and_what_was_drafted_before() -> None:
    layers, spans = _spans()
    # Three tokens of the call and the one that was sampled, then one draft behind the other.
    for number, (lengths, seq_lens) in enumerate([([2, 4], [7, 12]), ([1, 1], [8, 13])]):
        shifts = spans.lay_out(_pass(lengths, seq_lens), is_first=number == 0)
        assert layers.running is not None
        batch = layers.running[0].spans
        assert batch.query_start_loc.tolist() == [0, lengths[0], sum(lengths)]
        assert batch.span_start_loc.tolist() == [0, 1, 3]
        assert batch.num_tokens.tolist() == [seq_lens[0], 6, seq_lens[1] - 8]
        assert batch.position_delta.tolist() == [0, 3, 0]
        assert shifts is not None
        assert shifts.tolist() == [0] * lengths[0] + [12] * lengths[1]


def test_nothing_is_left_of_a_step() -> None:
    layers, spans = _spans()
    assert spans.reads_spans(["text", "call"]) and not spans.reads_spans(["text"])
    spans.lay_out(_pass([2, 4], [7, 12]), is_first=True)
    spans.end()
    assert layers.running is None
    spans.update({}, ["call"], {})
    assert spans.lay_out(_pass([2, 4], [7, 12]), is_first=True) is None
    assert layers.running is None, "no request of the batch is a call"
