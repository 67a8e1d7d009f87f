# SPDX-License-Identifier: Apache-2.0
"""A model whose messages are read here, and which the engine does not run. No torch, no vllm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# In place of the number of an adapter, which begins at 1.
OTHER_MODEL = 0


class AdapterRequest(Protocol):
    """An adapter, or another model: vLLM's `LoRARequest`, or an `OtherModel`."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_path(self) -> str: ...

    @property
    def lora_int_id(self) -> int: ...


@dataclass(frozen=True)
class OtherModel:
    """Stands where vLLM's request of an adapter does, whose names its attributes have."""

    lora_name: str
    lora_path: str = ""
    lora_int_id: int = OTHER_MODEL
