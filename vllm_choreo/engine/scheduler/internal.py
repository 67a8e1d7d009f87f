# SPDX-License-Identifier: Apache-2.0
"""Internal requests, which encode something again and answer no client."""

from __future__ import annotations

import uuid

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from vllm_choreo.store.encoding import Encoding


class InternalRequests:
    """Factory of internal requests; their ids are random, so that no client's id looks like one."""

    def __init__(self) -> None:
        self._prefix = f"choreo-{uuid.uuid4().hex}-"
        self._count = 0

    def make(
        self, encoding: Encoding, like: Request, start: int = 0, stop: int | None = None
    ) -> Request:
        """Make a request over the tokens of an encoding; vLLM samples a token, which is dropped.

        Args:
            like: the request whose turn and priority it has.
            start, stop: range of the encoding's tokens, if not all of them.
        """
        self._count += 1
        return Request(
            request_id=f"{self._prefix}{self._count}",
            prompt_token_ids=list(encoding.token_ids or ())[start:stop],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            lora_request=encoding.adapter.request if encoding.adapter else None,
            arrival_time=like.arrival_time,
            priority=like.priority,
        )

    def includes(self, item: Request | EngineCoreOutput) -> bool:
        """Return whether a request, or an output, is an internal one's."""
        return item.request_id.startswith(self._prefix)
