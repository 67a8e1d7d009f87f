# SPDX-License-Identifier: Apache-2.0
"""Pictures of calls in the scheduler: which engines take them, and where they lie in prompts."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from vllm_choreo.engine.scheduler.pictures import PictureRules, copied_pictures, features_at
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.store.pictures import Picture, PictureMemory, cut_pictures


def _config(**model: Any) -> Any:
    """Configuration of an engine that takes pictures, but for what is given."""
    options = {
        "multimodal_config": SimpleNamespace(mm_processor_cache_type="lru"),
        "is_mm_prefix_lm": False,
        "uses_mrope": False,
        "is_hybrid": False,
    }
    engine = {
        name: model.pop(name, None)
        for name in (*("speculative_config", "kv_transfer_config", "ec_transfer_config"),)
    }
    model_config = SimpleNamespace(**{**options, **model})
    return SimpleNamespace(model_config=model_config, **engine)


def _rows(model_type: str) -> dict[str, Any]:
    config = SimpleNamespace(
        model_type=model_type, vision_config=SimpleNamespace(spatial_merge_size=2)
    )
    return {"uses_mrope": True, "hf_config": config}


def _item(grid: tuple[int, ...]) -> MultiModalKwargsItem:
    field = MultiModalFieldElem(data=torch.tensor(grid), field=MultiModalBatchedField())
    return MultiModalKwargsItem({"image_grid_thw": field})


def _feature(modality: str = "image", grid: tuple[int, ...] = (1, 4, 12)) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=_item(grid),
        modality=modality,
        identifier="a",
        mm_position=PlaceholderRange(offset=3, length=12),
    )


def _rules(config: Any, memory: PictureMemory | None = None) -> PictureRules:
    return PictureRules(config, memory or PictureMemory(10**6, 10**6, gc.collect))


def _request(*features: MultiModalFeatureSpec) -> Any:
    return SimpleNamespace(mm_features=list(features))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"multimodal_config": None}, "takes no pictures"),
        ({"is_mm_prefix_lm": True}, "attend to one another"),
        (_rows("qwen2_vl"), r"several rows \(M-RoPE\).* of paddleocr_vl alone"),
        ({"is_hybrid": True}, "models with states"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "drafters with layers"),
        ({"kv_transfer_config": object()}, "connectors"),
        ({"ec_transfer_config": object()}, "connectors"),
        (
            {"multimodal_config": SimpleNamespace(mm_processor_cache_type="shm")},
            "mm_processor_cache_type='shm'",
        ),
    ],
)
def test_engines_that_take_no_pictures_say_why(options: dict[str, Any], reason: str) -> None:
    rules = _rules(_config(**options))
    assert rules.pictures_of(_request(), "t") == ()
    with pytest.raises(UnsupportedOptionError, match=f"{reason}.*leave pictures out") as caught:
        rules.pictures_of(_request(_feature()), "t")
    assert caught.value.parameter == "multi_modal_data"


def test_other_media_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="leave videos and sound out"):
        _rules(_config()).pictures_of(_request(_feature("video")), "t")


def test_pictures_are_read_from_a_request() -> None:
    """With rows of positions, a picture takes as many as its grid's longest side is long."""
    feature = _feature()
    (picture,) = _rules(_config()).pictures_of(_request(feature), "t")
    assert (picture.start, picture.num_tokens, picture.content) == (3, 12, "a")
    assert picture.num_positions is None and picture.feature == feature
    (picture,) = _rules(_config(**_rows("paddleocr_vl"))).pictures_of(_request(feature), "t")
    assert picture.num_positions == 6


def test_an_engine_without_memory_for_pictures_takes_none() -> None:
    with pytest.raises(UnsupportedOptionError, match="picture_memory_gib"):
        PictureRules(_config(), None).pictures_of(_request(_feature()), "t")


def test_equal_pictures_of_a_tenant_are_held_once() -> None:
    memory = PictureMemory(10**6, 10**6, gc.collect)
    rules = _rules(_config(), memory)
    shown = rules.pictures_of(_request(_feature(), _feature()), "t")
    again = rules.pictures_of(_request(_feature()), "t")
    assert len({id(picture.feature.data) for picture in (*shown, *again)}) == 1
    assert memory.num_bytes == 3 * 8
    other = rules.pictures_of(_request(_feature()), "u")
    assert memory.num_bytes == 6 * 8
    del shown, again, other
    assert memory.num_bytes == 0


def test_features_lie_where_tokens_are_run() -> None:
    """Also one that begins before the first token, and none that lies outside."""
    feature = _feature()
    pictures = [Picture(start, 12, "a", None, feature) for start in (-14, -4, 20, 60)]
    assert [f.mm_position.offset for f in features_at(pictures, 0, 60)] == [-4, 20]
    assert [f.mm_position.offset for f in features_at(pictures, 64, 200)] == [50, 60, 84, 124]
    assert feature.mm_position.offset == 3, "vLLM's own is left as it is"


def test_what_is_encoded_anew_has_its_own_pictures() -> None:
    pictures = (Picture(0, 2, "a"),)
    message = SimpleNamespace(id="doc")
    origin: Any = SimpleNamespace(pictures=pictures, token_ids=[5, 5, 7], message=message)
    assert copied_pictures(origin, (5, 5, 7), ()) == pictures
    with pytest.raises(UnsupportedOptionError, match="as a whole"):
        copied_pictures(origin, (5, 5), ())
    with pytest.raises(UnsupportedOptionError, match="leave others out"):
        copied_pictures(origin, (5, 5, 7), pictures)


def test_parts_have_the_pictures_that_they_cut() -> None:
    pictures = [Picture(5, 10, "a"), Picture(20, 10, "b")]
    assert cut_pictures(pictures, 15, 20) == ()
    assert cut_pictures(pictures, 0, 6) == (pictures[0],)
    assert [(p.start, p.content) for p in cut_pictures(pictures, 14, 21)] == [(-9, "a"), (6, "b")]
