# SPDX-License-Identifier: Apache-2.0
"""The spans of the batch, from the scheduler's plans to what the attention backend reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_not

import torch

from vllm_choreo.ops import Rotation, SharedReads, SpanBatch, plan_shared_reads
from vllm_choreo.plan import RequestSpans

_ORDINARY = RequestSpans((), (), (), (), 0)


@dataclass(frozen=True, eq=False)
class ChoreoBatch:
    """What a step adds to vLLM's attention metadata.

    Attributes:
        spans: of all requests of the batch, ordinary ones included.
        cos_sin: per rotation that the model has, float32 `[num_spans, rotary_dim]`.
        reads: what several of the requests attend to; None if nothing is, or if it is read by
            each of them alone.
    """

    spans: SpanBatch
    cos_sin: Mapping[Rotation, torch.Tensor]
    reads: SharedReads | None


class BatchPlanner:
    """Keeps the spans of running requests and lays them out for a batch.

    Between two steps of the same requests only the own spans grow, so the rest is kept: laying
    out, grouping and rotating cost nothing in a decode step.

    Attributes:
        shared_reading: read what several requests attend to once for all of them. May be set
            between two steps.
    """

    def __init__(
        self, block_size: int, rotations: Sequence[Rotation], shared_reading: bool = True
    ) -> None:
        self.block_size = block_size
        self.rotations = rotations
        self.shared_reading = shared_reading
        self._requests: dict[str, RequestSpans] = {}
        self._laid_out: list[RequestSpans] = []
        self._columns: dict[str, torch.Tensor] = {}
        self._own: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self._bases: torch.Tensor = torch.empty(0, dtype=torch.int32)
        self._cos_sin: dict[Rotation, torch.Tensor] = {}
        self._reads: SharedReads | None = None

    def update(self, started: Mapping[str, RequestSpans], finished: Sequence[str]) -> None:
        """Take in what the scheduler sent with a step."""
        for request_id in finished:
            self._requests.pop(request_id, None)
        self._requests.update(started)

    def batch(
        self,
        request_ids: Sequence[str],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> ChoreoBatch | None:
        """The batch's spans; None if every request reads its own tokens only.

        Args:
            request_ids: of the batch, in its order.
            query_start_loc: int32 `[num_reqs + 1]`.
            seq_lens: int32 `[num_reqs]`, tokens of the virtual sequences after this step.
            block_table: int32 `[num_reqs, max_blocks]`.
        """
        requests = [self._requests.get(request_id, _ORDINARY) for request_id in request_ids]
        if not any(request.first_slot for request in requests):
            return None
        # By identity: the spans of a request that starts again are a new object, and may lie in
        # other blocks.
        is_new = len(requests) != len(self._laid_out) or any(map(is_not, requests, self._laid_out))
        if is_new:
            self._lay_out(requests)
        num_tokens = self._columns["num_tokens"].clone()
        num_tokens[self._own] = seq_lens - self._bases
        spans = SpanBatch(
            query_start_loc=query_start_loc,
            block_table=block_table,
            span_start_loc=self._columns["span_start_loc"],
            first_slot=self._columns["first_slot"],
            num_tokens=num_tokens,
            stored_position=self._columns["stored_position"],
            position_delta=self._columns["position_delta"],
            block_size=self.block_size,
        )
        if is_new:  # later steps only let the own spans grow, as vLLM lets its sequences
            spans.validate()
            self._reads = plan_shared_reads(spans)
        return ChoreoBatch(spans, self._cos_sin, self._reads if self.shared_reading else None)

    def _lay_out(self, requests: list[RequestSpans]) -> None:
        """Flatten the spans; each request's own span comes last and is not rotated."""
        with_own = [
            dataclasses.replace(
                request,
                first_slot=(*request.first_slot, request.base),
                num_tokens=(*request.num_tokens, 0),
                stored_position=(*request.stored_position, request.base),
                position_delta=(*request.position_delta, 0),
            )
            for request in requests
        ]
        ends = list(accumulate(len(request.first_slot) for request in with_own))
        self._columns = {
            name: _int32([x for request in with_own for x in getattr(request, name)])
            for name in ("first_slot", "num_tokens", "stored_position", "position_delta")
        }
        self._columns["span_start_loc"] = _int32([0, *ends])
        self._own = torch.tensor(ends, dtype=torch.int64) - 1
        self._bases = _int32([request.base for request in requests])
        self._cos_sin = {
            rotation: rotation.cos_sin(self._columns["position_delta"])
            for rotation in self.rotations
        }
        self._laid_out = requests


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
