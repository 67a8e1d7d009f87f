# SPDX-License-Identifier: Apache-2.0
"""Pictures in recipes in front of several engines: names of encodings, prompts, what is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from vllm_choreo.api.fleet_snapshots import loaded_messages
from vllm_choreo.api.picture_prompts import concat_prompts, cut_prompt
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import SharedPictures, bound_recipe, recipe_of
from vllm_choreo.engine.picture_files import picture_bytes
from vllm_choreo.errors import SpanError, UnsupportedOptionError
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace

_TOKENS = (5, 9, 9, 9, 6)


def _item(number: float = 1.0) -> MultiModalKwargsItem:
    element = MultiModalFieldElem(torch.tensor([number]), MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": element})


def _prompt(name: str = "a", item: MultiModalKwargsItem | None = None) -> Any:
    place = PlaceholderRange(offset=1, length=3)
    items = MultiModalKwargsItems({"image": [item or _item()]})
    return mm_input(list(_TOKENS), items, {"image": [name]}, {"image": [place]})


def _call(prompt: Any, **params: Any) -> PlannedCall:
    options = {"session": "s", "tenant": "t", "save_as": "s/m", **params}
    call = ChoreoParams(parents=(), kind="prefill", **options)
    return PlannedCall("", _TOKENS, call, None, Trace("s/m"), prompt=prompt)


def test_equal_tokens_of_other_pictures_are_another_encoding() -> None:
    first, same, other = (bound_recipe(_call(_prompt(name)), {}) for name in "aab")
    plain = bound_recipe(_call(None), {})
    assert first.key == same.key and len({r.key for r in (first, other, plain)}) == 3
    # What copies a message shows what that shows.
    copies = [
        bound_recipe(_call(None, copy_of="s/doc"), {"s/doc": origin}) for origin in (first, other)
    ]
    assert [copy.pictures for copy in copies] == [first.pictures, other.pictures]
    assert copies[0].key == first.key != copies[1].key


def test_an_answer_is_made_again_with_the_pictures_of_its_header() -> None:
    recipe = recipe_of(_call(_prompt()), (*_TOKENS, 7, 8), {})
    assert recipe.call.prompt is not None
    assert recipe.call.prompt["prompt_token_ids"] == [*_TOKENS, 7, 8]
    assert recipe.pictures == (("a", 1, 3),)


def test_equal_pictures_are_held_once() -> None:
    shared, item = SharedPictures(), _item()
    first = shared.share(_call(_prompt("a", item)))
    again, other = (shared.share(_call(_prompt(name, _item()))) for name in "ab")
    held = [call.prompt["mm_kwargs"]["image"][0] for call in (first, again, other) if call.prompt]
    assert held[0] is held[1] is item and held[2] is not item
    assert shared.share(_call(None)).prompt is None


def test_prompts_are_cut_and_put_together() -> None:
    prompt = _prompt()
    for start, stop in ((0, 2), (2, None), (3, 5)):
        with pytest.raises(SpanError, match="which are 1 … 3"):
            cut_prompt(prompt, start, stop)
    assert cut_prompt(prompt, 4, None) == {"type": "token", "prompt_token_ids": [6]}
    part = cut_prompt(prompt, 1, 4)
    joined: Any = concat_prompts([part, cut_prompt(prompt, 0, 1), prompt], "salt")
    assert joined["prompt_token_ids"] == [9, 9, 9, 5, *_TOKENS]
    assert [place.offset for place in joined["mm_placeholders"]["image"]] == [0, 5]
    assert joined["cache_salt"] == "salt"


def test_loaded_messages_show_their_pictures() -> None:
    feature = MultiModalFeatureSpec(_item(), "image", "a", PlaceholderRange(0, 3), "a")
    pictures = [{"name": "a", "content": picture_bytes(feature)}]
    entry: dict[str, Any] = {
        **{"message": "s/m", "is_copy": False, "tokens": list(_TOKENS), "parents": []},
        **{"spans": [], "new_offset": 0, "weights": None, "patch": None, "adapter": None},
        **{"keeps": [], "is_untrusted": False, "data": None, "pictures": [[0, 1]]},
    }

    def loaded(**fields: Any) -> Any:
        recipes = {"encodings": [{**entry, **fields}], "pictures": pictures}
        return loaded_messages("s", "t", recipes, {"s/m": 0})

    ((recipe, _),) = loaded()
    assert recipe.pictures == (("a", 1, 3),)
    assert recipe.call.prompt is not None and recipe.call.prompt["mm_hashes"] == {"image": ["a"]}
    for start in (-1, 3):
        with pytest.raises(UnsupportedOptionError, match="inside of a picture"):
            loaded(pictures=[[0, start]])
