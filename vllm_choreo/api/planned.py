# SPDX-License-Identifier: Apache-2.0
"""`PlannedCall`: a call that a session has validated, before it is submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs.engine import MultiModalInput
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
        prompt: vLLM's input with pictures among the new tokens; None: there are none.
        trace: history of the message that it makes.
    """

    text: str
    token_ids: tuple[int, ...]
    params: ChoreoParams
    sampling_params: SamplingParams | None
    trace: Trace
    adapter: LoRARequest | None = None
    role: str | None = None
    prompt: MultiModalInput | None = None

    @property
    def id(self) -> str:
        assert self.params.save_as is not None
        return self.params.save_as

    @property
    def num_pictures(self) -> int:
        """Pictures among the new tokens."""
        return sum(map(len, self.prompt["mm_placeholders"].values())) if self.prompt else 0

    @property
    def is_decode(self) -> bool:
        return self.params.kind == "decode"
