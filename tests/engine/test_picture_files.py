# SPDX-License-Identifier: Apache-2.0
"""Pictures as bytes: what comes back is what was there, and nothing else is read."""

from __future__ import annotations

import pytest
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from vllm_choreo.engine.picture_files import picture_bytes, picture_of
from vllm_choreo.errors import KeptError, UnsupportedOptionError


def _feature(is_embed: torch.Tensor | None = None, **data: object) -> MultiModalFeatureSpec:
    tensors = {
        "pixel_values": torch.rand(3, 8, 8),
        "grid": torch.tensor([1, 4, 2]),
        "mask": torch.rand(6, 2) > 0.5,
    }
    fields: list[BaseMultiModalField] = [
        MultiModalFlatField(slices=[slice(0, 3)], dim=1),
        MultiModalBatchedField(keep_on_cpu=True),
        MultiModalSharedField(batch_size=4),
    ]
    item = MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(tensor, field)  # type: ignore[arg-type]
            for (name, tensor), field in zip((tensors | data).items(), fields, strict=True)
        }
    )
    return MultiModalFeatureSpec(item, "image", "a", PlaceholderRange(5, 4, is_embed), "a")


@pytest.mark.parametrize("is_embed", [None, torch.tensor([True, False, True, True])])
def test_a_picture_comes_back(is_embed: torch.Tensor | None) -> None:
    feature = _feature(is_embed)
    content = picture_bytes(feature)
    assert content == picture_bytes(feature)
    found = picture_of(content, "a")
    assert found.data == feature.data and found.data is not feature.data
    assert (found.modality, found.identifier, found.mm_hash) == ("image", "a", "a")
    assert found.mm_position == PlaceholderRange(0, 4, is_embed)
    assert found.data is not None and feature.data is not None
    for name, element in found.data.items():
        theirs = feature.data[name]
        assert element.data.dtype == theirs.data.dtype
        assert element.field.keep_on_cpu == theirs.field.keep_on_cpu
    flat, shared = found.data["pixel_values"].field, found.data["mask"].field
    assert isinstance(flat, MultiModalFlatField) and flat.dim == 1
    assert isinstance(shared, MultiModalSharedField) and shared.batch_size == 4


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(UnsupportedOptionError, match="'grid', a list"):
        picture_bytes(_feature(grid=[torch.rand(2), torch.rand(3)]))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:-3],
        lambda content: content.replace(b"batched", b"garbled"),
        lambda content: content.replace(b'num_tokens\\": 4', b'num_tokens\\": 5'),
        lambda content: content.replace(b"data.grid", b"data.gird"),
    ],
)
def test_other_bytes_are_refused(change: object) -> None:
    content = picture_bytes(_feature(torch.tensor([True] * 4)))
    assert callable(change) and change(content) != content
    with pytest.raises(KeptError, match="damaged"):
        picture_of(change(content), "a")
