# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters that the server knows by name: those that vLLM's routes take as `model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs
from vllm.lora.request import LoRARequest

from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels


class ServedAdapters:
    """Finds adapters by their names.

    Args:
        models: vLLM's `OpenAIServingModels`.
    """

    def __init__(self, models: OpenAIServingModels) -> None:
        self._models = models

    async def resolve(self, name: str | None) -> LoRARequest | str | None:
        """Adapter as a call takes it: the `LoRARequest` of this name as it is now.

        The name of the model stands for none, and is passed on as the name that engines know.

        Raises:
            ChoreoError: there is no such adapter; the error lists those that there are.
        """
        models = self._models
        if name is None:
            return None
        if name in models.lora_requests:
            return models.lora_requests[name]
        if models.is_base_model(name):
            return models.model_name()
        if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            found = await models.resolve_lora(name)
            if isinstance(found, LoRARequest):
                return found
        known = ", ".join(sorted(models.lora_requests)) or "none (start it with --lora-modules)"
        raise ChoreoError(
            f"the server knows no such adapter. It knows: {known}. {models.model_name()} stands "
            "for the model alone",
            parameter="adapter",
            value=name,
        )
