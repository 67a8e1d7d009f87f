# SPDX-License-Identifier: Apache-2.0
"""vLLM's prompts with pictures, cut into parts and put together again; without, those of tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias, cast

from vllm_choreo.chat.parts import ChatPicture
from vllm_choreo.errors import SpanError
from vllm_choreo.semantics.pictures import IMAGE

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput, MultiModalInput, TokensInput

    Prompt: TypeAlias = TokensInput | MultiModalInput

_SECRET = secrets.token_bytes(32)


def with_tokens(prompt: MultiModalInput, token_ids: Sequence[int]) -> MultiModalInput:
    """Return the prompt with these tokens, which begin with its own."""
    return cast("MultiModalInput", {**prompt, "prompt_token_ids": list(token_ids)})


def cut_prompt(prompt: Prompt, start: int | None, stop: int | None) -> Prompt:
    """Tokens `start … stop-1` of a prompt, with all pictures among them.

    Raises:
        SpanError: a picture lies in them in part.
    """
    from vllm.inputs.engine import tokens_input

    token_ids = list(prompt["prompt_token_ids"][start:stop])
    if prompt["type"] == "token":
        return tokens_input(token_ids)
    first, places = start or 0, prompt["mm_placeholders"][IMAGE]
    last = first + len(token_ids)
    inside = [n for n, p in enumerate(places) if first < p.offset + p.length and p.offset < last]
    for place in (places[n] for n in inside):
        if not first <= place.offset <= last - place.length:
            raise SpanError(
                "a part of a picture is no text: name all of its tokens, which are "
                f"{place.offset} … {place.offset + place.length - 1}",
                parameter="parents",
                value=(first, last),
            )
    if not inside:
        return tokens_input(token_ids)
    return picture_prompt(
        token_ids,
        [prompt["mm_kwargs"][IMAGE][n] for n in inside],
        [prompt["mm_hashes"][IMAGE][n] for n in inside],
        [replace(places[n], offset=places[n].offset - first) for n in inside],
    )


def concat_prompts(prompts: Sequence[Prompt], cache_salt: str | None = None) -> Prompt:
    """One prompt of several, one after the other.

    Args:
        cache_salt: salt of vLLM's prefix cache: only requests of the same salt share blocks.
    """
    from vllm.inputs.engine import tokens_input

    token_ids, items, names, places = list[int](), list[object](), list[str](), list[object]()
    for prompt in prompts:
        if prompt["type"] == "multimodal":
            items += prompt["mm_kwargs"][IMAGE]
            names += prompt["mm_hashes"][IMAGE]
            places += [
                replace(place, offset=place.offset + len(token_ids))
                for place in prompt["mm_placeholders"][IMAGE]
            ]
        token_ids += prompt["prompt_token_ids"]
    if not items:
        return tokens_input(token_ids, cache_salt=cache_salt)
    return picture_prompt(token_ids, items, names, places, cache_salt)


def picture_prompt(
    token_ids: list[int],
    items: Sequence[object],
    names: list[str],
    places: Sequence[object],
    cache_salt: str | None = None,
) -> MultiModalInput:
    """Make a prompt of tokens with pictures among them.

    Args:
        items: inputs of the model's encoder, one for each picture.
        names: hashes of the pictures, by which vLLM finds them.
        places: ranges of the tokens that stand for each.
        cache_salt: salt of vLLM's prefix cache: only requests of the same salt share blocks.
    """
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    kwargs = MultiModalKwargsItems({IMAGE: list(items)})
    hashes, placeholders = {IMAGE: names}, {IMAGE: list(places)}
    return mm_input(token_ids, kwargs, hashes, placeholders, cache_salt=cache_salt)


def pictures_of(prompt: Prompt) -> list[ChatPicture]:
    """Pictures of a prompt, each with a number of its content's own."""
    if prompt["type"] == "token":
        return []
    places, names = prompt["mm_placeholders"][IMAGE], prompt["mm_hashes"][IMAGE]
    return [
        ChatPicture(place.offset, place.offset + place.length, _number(name))
        for place, name in zip(places, names, strict=True)
    ]


def _number(name: str) -> int:
    # Under a secret: nobody can look for two pictures of one number.
    digest = blake2b(name.encode(), key=_SECRET, digest_size=8).digest()
    return -1 - (int.from_bytes(digest) >> 1)


def num_picture_bytes(prompt: EngineInput, start: int, stop: int) -> int:
    """Bytes that the engine will hold of the pictures that begin in tokens `start … stop-1`."""
    from vllm.multimodal.cache.base import MultiModalCache

    if prompt["type"] != "multimodal":
        return 0
    shown = zip(prompt["mm_placeholders"][IMAGE], prompt["mm_kwargs"][IMAGE], strict=True)
    return sum(
        MultiModalCache.get_item_size(item) for place, item in shown if start <= place.offset < stop
    )
