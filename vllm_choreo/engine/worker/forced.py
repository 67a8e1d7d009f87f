# SPDX-License-Identifier: Apache-2.0
"""Forced tokens: a request samples the tokens it is given, while decoding is computed in full.

    LLM(model, logits_processors=["vllm_choreo.engine.worker.forced:ForcedTokens"])
    SamplingParams(extra_args={"forced_tokens": [17, 4, 2]}, max_tokens=3)

They serve to replay a recorded workflow, and to compare two ways of computing the same tokens. The
distributions that the model gave in their place can be captured, see `engine.captured_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from vllm_choreo.engine import captured_logprobs

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

KEY = "forced_tokens"


class _Forced(NamedTuple):
    """Forced tokens of one request.

    Attributes:
        tokens: ids to sample, in order.
        sampled: the live list of those sampled so far.
        capture_as: name under which its distributions are captured, or None.
    """

    tokens: Sequence[int]
    sampled: Sequence[int]
    capture_as: str | None


class ForcedTokens(LogitsProcessor):
    """Mask of every logit but that of the next forced token; other requests are left as they are.

    A request samples freely where its list has ended, and where an id lies outside the vocabulary
    (the size of which the front end, where requests are refused, does not know).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Forced] = {}  # by row of the batch

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request before it reaches the engine core.

        Raises:
            VLLMValidationError: `extra_args["forced_tokens"]` is not a list of token ids.
        """
        tokens = (sampling_params.extra_args or {}).get(KEY)
        if tokens is None:
            return
        if not isinstance(tokens, list) or not tokens:
            _refuse("must be a list of at least one token id", tokens)
        for token in tokens:
            if type(token) is not int or token < 0:
                _refuse("must hold token ids, that is ints of 0 or more", token)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, _state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force one token per request; `logits` is float32 [num_requests, vocab_size]."""
        rows, tokens = [], []
        for row, request in self._requests.items():
            position = len(request.sampled)
            if position < len(request.tokens) and request.tokens[position] < logits.shape[1]:
                rows.append(row)
                tokens.append(request.tokens[position])
                if request.capture_as is not None:
                    said = logits[row].log_softmax(-1, dtype=torch.float32)
                    captured_logprobs.capture(request.capture_as, position, said.cpu().numpy())
        if rows:
            where = torch.tensor(rows, device=logits.device)
            logits.index_fill_(0, where, float("-inf"))
            # Zero, not what it was: another option may have masked it.
            logits[where, torch.tensor(tokens, device=logits.device)] = 0.0
        return logits


def _state(
    params: SamplingParams, prompt: Sequence[int] | None, sampled: Sequence[int]
) -> _Forced | None:
    extra = params.extra_args or {}
    tokens = extra.get(KEY)
    return None if tokens is None else _Forced(tokens, sampled, extra.get(captured_logprobs.KEY))


def _refuse(reason: str, value: object) -> NoReturn:
    raise VLLMValidationError(f"{KEY} {reason}", parameter=KEY, value=value)
