# SPDX-License-Identifier: Apache-2.0
"""`PlannedCall`: a call that a session has validated, before it is submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One validated call.

    Attributes:
        text, token_ids: the new tokens, and their text.
        params: parameters for the engine; `params.save_as` is the message's id.
        sampling_params: the caller's for decode, None for prefill.
        adapter: the `LoRARequest` that encodes the new tokens and generates, or None.
        role: role of the message in its workflow, or None.
        trace: history of the message that it makes.
    """

    text: str
    token_ids: tuple[int, ...]
    params: ChoreoParams
    sampling_params: SamplingParams | None
    trace: Trace
    adapter: LoRARequest | None = None
    role: str | None = None

    @property
    def id(self) -> str:
        assert self.params.save_as is not None
        return self.params.save_as

    @property
    def is_decode(self) -> bool:
        return self.params.kind == "decode"
