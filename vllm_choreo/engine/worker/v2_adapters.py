# SPDX-License-Identifier: Apache-2.0
"""LoRA on vLLM's model runner V2: logits of each row by the adapter of its own request.

vLLM sets adapters for one row of each request. Logits are computed of more: of the drafts that are
checked, and of a prompt's tokens whose logprobs are asked for. Then its kernels on CPU end the
engine, and those on GPU take the adapters that they find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Logits of rows of hidden states."""

UseAdaptersOf = Callable[["InputBatch", np.ndarray], None]
"""Sets adapters for the next rows: of which requests they are, by their number in the batch."""


def requests_of_logits(batch: InputBatch) -> np.ndarray:
    """Number in the batch of the request of each row from which is sampled, int64 [num_rows]."""
    return np.repeat(
        np.arange(batch.num_reqs), np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1])
    )


def requests_of_tokens(batch: InputBatch) -> np.ndarray:
    """Number in the batch of each token's request, int64 [num_tokens]."""
    return np.repeat(np.arange(batch.num_reqs), batch.num_scheduled_tokens)


class ChoreoPromptLogprobsWorker(PromptLogprobsWorker):
    """Worker that sets adapters for the rows whose logits it computes."""

    _use_adapters_of: UseAdaptersOf

    @classmethod
    def take_over(cls, worker: PromptLogprobsWorker, use_adapters_of: UseAdaptersOf) -> None:
        """Make the worker of a model runner with LoRA one of this class."""
        worker.__class__ = type(
            cls.__name__, (cls,), {"_use_adapters_of": staticmethod(use_adapters_of)}
        )

    def compute_prompt_logprobs(
        self,
        logits_fn: Logits,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        found: dict[str, LogprobsTensors] = super().compute_prompt_logprobs(
            self._logits_by_adapter(logits_fn, hidden_states, input_batch),
            *(hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens),
        )
        return found

    def compute_prompt_token_id_logprobs(
        self,
        logits_fn: Logits,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        prompt_lens: np.ndarray,
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = super().compute_prompt_token_id_logprobs(
            self._logits_by_adapter(logits_fn, hidden_states, input_batch),
            *(hidden_states, input_batch, prompt_lens),
        )
        return found

    def _logits_by_adapter(
        self, logits_fn: Logits, hidden_states: torch.Tensor, batch: InputBatch
    ) -> Logits:
        requests = requests_of_tokens(batch)

        def compute(rows: torch.Tensor) -> torch.Tensor:
            # vLLM cuts them from a step's: where the cut lies tells which they are.
            cut = rows.storage_offset() - hidden_states.storage_offset()
            first = cut // hidden_states.stride(0)
            self._use_adapters_of(batch, requests[first : first + len(rows)])
            return logits_fn(rows)

        return compute
