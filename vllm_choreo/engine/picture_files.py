# SPDX-License-Identifier: Apache-2.0
"""Pictures as bytes: what vLLM's encoder is given of one, in the form of safetensors.

    data.NAME   a tensor of the model's processor
    is_embed    uint8 `[num_tokens]`: which tokens stand for rows of the encoder; absent: all do
    metadata    "picture": JSON of `num_tokens`, and of how vLLM joins each tensor with those of
                other pictures: `fields`, by NAME

No code is in it, and none is run to read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from vllm_choreo.errors import KeptError, UnsupportedOptionError
from vllm_choreo.semantics.pictures import IMAGE

if TYPE_CHECKING:
    from vllm.multimodal.inputs import BaseMultiModalField

_ABOUT, _IS_EMBED, _DATA = "picture", "is_embed", "data."


def picture_bytes(feature: MultiModalFeatureSpec) -> bytes:
    """Bytes of a picture, wherever it lies.

    Raises:
        UnsupportedOptionError: the model's encoder is given something else than tensors.
    """
    place, tensors, fields = feature.mm_position, dict[str, torch.Tensor](), dict[str, Any]()
    assert feature.data is not None, "recipes hold the data of their pictures"
    for name, element in feature.data.items():
        if not isinstance(element.data, torch.Tensor):
            raise UnsupportedOptionError(
                f"files hold tensors, and of a picture this model is also given {name!r}, a "
                f"{type(element.data).__name__}: save messages that have no pictures, and were not "
                "encoded behind any",
                parameter="messages",
                value=name,
            )
        tensors[_DATA + name] = element.data.contiguous()
        fields[name] = _field_json(element.field)
    if place.is_embed is not None:
        tensors[_IS_EMBED] = place.is_embed.to(torch.uint8).contiguous()
    about = {"num_tokens": place.length, "fields": fields}
    return save(tensors, {_ABOUT: json.dumps(about, sort_keys=True)})


def picture_of(content: bytes, name: str) -> MultiModalFeatureSpec:
    """The picture of some bytes, as the first tokens of a prompt.

    Args:
        name: hash of the picture, by which vLLM finds it.

    Raises:
        KeptError: these are no bytes of a picture.
    """
    try:
        tensors = load(content)
        about = json.loads(_metadata(content)[_ABOUT])
        num_tokens, is_embed = int(about["num_tokens"]), tensors.get(_IS_EMBED)
        if is_embed is not None and is_embed.shape != (num_tokens,):
            raise ValueError("it has another number of tokens")
        data = {
            key: MultiModalFieldElem(tensors[_DATA + key], _field_of(field))
            for key, field in about["fields"].items()
        }
    except Exception as error:  # of safetensors, or of a header that says something else
        raise KeptError(
            f"the file of a picture is damaged ({error}): save again, or load another copy",
            parameter="uri",
            value=name,
        ) from None
    place = PlaceholderRange(0, num_tokens, None if is_embed is None else is_embed.bool())
    return MultiModalFeatureSpec(MultiModalKwargsItem(data), IMAGE, name, place, name)


def _metadata(content: bytes) -> Mapping[str, str]:
    """Metadata of a file of safetensors, whose header has its length before it."""
    length = int.from_bytes(content[:8], "little")
    header: Mapping[str, Mapping[str, str]] = json.loads(content[8 : 8 + length])
    return header["__metadata__"]


def _field_json(field: BaseMultiModalField) -> list[Any]:
    """How vLLM joins a tensor with those of other pictures."""
    if isinstance(field, MultiModalFlatField):
        return _flat_json(field)
    if isinstance(field, MultiModalSharedField):
        return _shared_json(field)
    assert isinstance(field, MultiModalBatchedField), "vLLM has no other"
    return ["batched", field.keep_on_cpu, 0]


def _flat_json(field: MultiModalFlatField) -> list[Any]:
    return ["flat", field.keep_on_cpu, field.dim]


def _shared_json(field: MultiModalSharedField) -> list[Any]:
    return ["shared", field.keep_on_cpu, field.batch_size]


def _field_of(found: list[Any]) -> BaseMultiModalField:
    kind, on_cpu, number = str(found[0]), bool(found[1]), int(found[2])
    makers: dict[str, Callable[[], BaseMultiModalField]] = {
        # The slices cut what the processor made of several pictures, and this is one of them.
        "flat": lambda: MultiModalFlatField(slices=[], dim=number, keep_on_cpu=on_cpu),
        "shared": lambda: MultiModalSharedField(batch_size=number, keep_on_cpu=on_cpu),
        "batched": lambda: MultiModalBatchedField(keep_on_cpu=on_cpu),
    }
    return makers[kind]()
