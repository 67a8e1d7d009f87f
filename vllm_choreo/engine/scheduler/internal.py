# SPDX-License-Identifier: Apache-2.0
"""Requests of our own: they encode something again, and answer nobody."""

from __future__ import annotations

import uuid

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from vllm_choreo.store.encoding import Encoding


class InternalRequests:
    """Makes them, and knows them by their ids: random, so that no client's id looks like one."""

    def __init__(self) -> None:
        self._prefix = f"choreo-{uuid.uuid4().hex}-"
        self._count = 0

    def make(
        self, encoding: Encoding, like: Request, start: int = 0, stop: int | None = None
    ) -> Request:
        """A request over the tokens of an encoding; vLLM samples a token, we drop it.

        Args:
            like: the request whose turn and priority it has.
            start, stop: of the encoding's tokens, if not all of them.
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
        """Whether a request, or an output, is ours."""
        return item.request_id.startswith(self._prefix)
