# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that acts on some tokens of a packed sequence and not on the others.

An engine encodes each call with the adapter that the call names. In a packed sequence all calls
stand in one row, so what the adapter adds is multiplied by 1 or 0, token by token. That is exact:
where it is 0, the model is the base model to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.lab.train.packed_attention import carried

if TYPE_CHECKING:
    from peft import PeftModel


def gate_adapter(model: PeftModel) -> None:
    """Let the LoRA layers of a `PeftModel` act where the running forward says.

    Raises:
        UnsupportedOptionError: the adapter is more than LoRA matrices on linear layers: such
            parts would act on every token, and vLLM would not serve them.
    """
    for module in _gated_modules(model):
        if not getattr(module, "_choreo_gated", False):
            module.register_forward_hook(_gate)
            module._choreo_gated = True


def _gate(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Multiply what the adapter adds, `[1, num_tokens, num_out]`, by 1 or 0 for each token."""
    adapted = carried().adapted
    return output if adapted is None else output * adapted[:, None].to(output.dtype)


def _gated_modules(model: PeftModel) -> list[torch.nn.Module]:
    """The last linear map of every LoRA layer."""
    from peft import PeftType

    kinds = {config.peft_type for config in model.peft_config.values()}
    if kinds != {PeftType.LORA} or len(model.peft_config) != 1:
        raise _unsupported("one adapter, of kind LORA, is trained", sorted(map(str, kinds)))
    gated: list[torch.nn.Module] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not hasattr(module, "lora_B"):
            continue
        if module.lora_variant or len(module.lora_embedding_A):
            raise _unsupported("DoRA, aLoRA and adapted embeddings are not", name)
        gated += module.lora_B.values()
        for matrix in (*module.lora_A.values(), *module.lora_B.values()):
            inside |= set(map(id, matrix.parameters()))
    others = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]
    if others:
        raise _unsupported("modules_to_save and trained biases are not", others[0])
    return gated


def _unsupported(reason: str, value: object) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"an adapter of plain LoRA matrices on linear layers is needed: {reason}",
        parameter="model",
        value=value,
    )
