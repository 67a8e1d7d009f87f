# SPDX-License-Identifier: Apache-2.0
"""Pictures of calls before they are planned: names of their content, their form, the renderer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from vllm_choreo.api.pictures import PictureRenderer, content_id
from vllm_choreo.errors import ChoreoError, TooLongError, UnsupportedOptionError
from vllm_choreo.semantics.call import CallSpec, Tokenized
from vllm_choreo.semantics.pictures import pictures_in

_PICTURE = Image.new("RGB", (4, 4), "red")


class _Renderer:
    """Renderer that makes five tokens of a placeholder, 9."""

    async def render_cmpl_async(self, prompts: list[Any], skip_mm_cache: bool) -> list[Any]:
        return self.render_cmpl(prompts, skip_mm_cache)

    def render_cmpl(self, prompts: list[Any], skip_mm_cache: bool) -> list[Any]:
        (prompt,) = prompts
        assert skip_mm_cache, "what vLLM believes the engine to have may not be there"
        self.uuids = prompt["multi_modal_uuids"]["image"]
        if prompt["multi_modal_data"]["image"][0].size == (1, 1):
            raise ValueError("a picture is larger than that")
        ids, places = [], []
        for token in prompt["prompt_token_ids"]:
            if token == 9:
                places.append(PlaceholderRange(offset=len(ids), length=5))
            ids += [9] * 5 if token == 9 else [token]
        return [{"prompt_token_ids": ids, "mm_placeholders": {"image": places}}]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids: "<image>")


def _engine(encoder_tokens: int = 100, takes: bool = True) -> Any:
    model = SimpleNamespace(
        supports_multimodal_inputs=takes,
        model="a/model",
        hf_config=SimpleNamespace(image_token_id=9),
    )
    return SimpleNamespace(
        renderer=_Renderer(),
        input_processor=SimpleNamespace(mm_encoder_cache_size=encoder_tokens),
        vllm_config=SimpleNamespace(model_config=model),
    )


def _session(mode: str = "choreo") -> Any:
    return SimpleNamespace(
        mode=mode,
        tenant="a",
        content_of=lambda spec: (spec.content, "five <image> six"),
        entries=SimpleNamespace(is_limited=True),
    )


_SPEC = CallSpec("prefill", (5, 9, 6), multi_modal_data={"image": _PICTURE})


def test_a_placeholder_becomes_the_tokens_of_its_picture() -> None:
    """In both ways alike; calls without pictures are passed on as they are."""
    engine, plain = _engine(), CallSpec("prefill", "text")
    renderer = PictureRenderer(_session(), engine)
    made = renderer.render([plain, _SPEC])
    assert made[0] is plain and made == asyncio.run(renderer.render_async([plain, _SPEC]))
    assert made[1].multi_modal_data is None
    content = made[1].content
    assert isinstance(content, Tokenized)
    assert content.token_ids == (5, 9, 9, 9, 9, 9, 6) and content.text == "five <image> six"
    assert isinstance(content.prompt, dict)
    assert content.prompt["mm_placeholders"]["image"][0].offset == 1
    assert engine.renderer.uuids == [content_id("a", _PICTURE)]
    renderer.render([replace(_SPEC, tenant="operator")])
    assert engine.renderer.uuids == [content_id("operator", _PICTURE)]


@pytest.mark.parametrize(
    ("spec", "session", "engine", "error", "message"),
    [
        (_SPEC, _session(), _engine(takes=False), UnsupportedOptionError, "takes no pictures"),
        (_SPEC, _session("baseline"), _engine(), UnsupportedOptionError, "baseline mode"),
        (_SPEC, _session(), _engine(4), TooLongError, "takes 5 tokens.* up to 4 at once"),
        (replace(_SPEC, content=(5, 6)), _session(), _engine(), ChoreoError, "there are 0"),
        (replace(_SPEC, content=(9, 9)), _session(), _engine(), ChoreoError, "'<image>'.* are 2"),
        (
            replace(_SPEC, multi_modal_data={"image": Image.new("RGB", (1, 1))}),
            *(_session(), _engine(), ChoreoError),
            "makes no prompt of these pictures: a picture is larger than that",
        ),
    ],
)
def test_what_is_wrong_is_named(
    spec: CallSpec, session: Any, engine: Any, error: type[ChoreoError], message: str
) -> None:
    renderer = PictureRenderer(session, engine)
    for render in (renderer.render, lambda specs: asyncio.run(renderer.render_async(specs))):
        with pytest.raises(error, match=message) as caught:
            render([spec])
        assert caught.value.parameter == "multi_modal_data"


def _rendered() -> Any:
    """Tokens 5, a picture, 6 and 7, a picture, 8, as vLLM renders them."""
    places = [PlaceholderRange(offset=1, length=5), PlaceholderRange(offset=8, length=5)]
    items = MultiModalKwargsItems({"image": [MultiModalKwargsItem(), MultiModalKwargsItem()]})
    ids = [5, *[9] * 5, 6, 7, *[9] * 5, 8]
    return mm_input(ids, items, {"image": ["a", "b"]}, {"image": places})


def test_parts_of_a_prompt_have_their_pictures() -> None:
    renderer = PictureRenderer(_session(), _engine())
    whole = renderer.part(_rendered())
    assert whole.token_ids == tuple(_rendered()["prompt_token_ids"]) and whole.text == "<image>"
    behind: Any = renderer.part(_rendered(), 6).prompt
    assert behind["prompt_token_ids"] == [6, 7, *[9] * 5, 8]
    assert behind["mm_hashes"] == {"image": ["b"]} and len(behind["mm_kwargs"]["image"]) == 1
    assert [place.offset for place in behind["mm_placeholders"]["image"]] == [2]
    between = renderer.part(_rendered(), 6, 8)
    assert between.token_ids == (6, 7) and between.prompt is None
    with pytest.raises(TooLongError, match="takes 5 tokens"):
        PictureRenderer(_session(), _engine(4)).part(_rendered())


def test_the_form_is_that_of_vllm() -> None:
    assert pictures_in({"image": _PICTURE}) == pictures_in({"image": [_PICTURE]}) == [_PICTURE]
    for wrong in (_PICTURE, {}, {"image": []}, {"video": _PICTURE}, {"image": 1, "audio": 2}):
        with pytest.raises(ChoreoError) as caught:
            pictures_in(wrong)
        assert caught.value.parameter == "multi_modal_data"


def test_pictures_have_equal_names_where_all_that_is_seen_is_equal() -> None:
    array = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    shown = Image.fromarray(array)
    tagged = shown.copy()
    tagged.getexif()[Image.ExifTags.Base.ImageID] = "an id that its writer chose"
    palette = shown.convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    other_colours = palette.copy()
    other_colours.putpalette(bytes(range(24)))
    different = [
        *(shown, shown.transpose(Image.Transpose.FLIP_TOP_BOTTOM), shown.convert("L")),
        *(palette, other_colours, array, array[::-1], array.astype(np.int64)),
        *(torch.zeros(2, 8), torch.zeros(4, 4), torch.zeros(2, 8, dtype=torch.bfloat16)),
    ]
    names = [content_id("a", picture) for picture in different]
    assert len({*names, content_id("b", shown)}) == len(names) + 1
    assert content_id("a", shown.copy()) == content_id("a", tagged) == names[0]
    assert content_id("a", array.copy()) == names[5]
    with pytest.raises(ChoreoError, match="PIL image") as caught:
        content_id("a", "https://a.b/c.png")
    assert caught.value.value == "str"
