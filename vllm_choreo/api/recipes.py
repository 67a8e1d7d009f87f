# SPDX-License-Identifier: Apache-2.0
"""Recipes of messages in front of the engines: what it takes to make a message on any of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from vllm_choreo.api.picture_prompts import with_tokens
from vllm_choreo.api.planned import PlannedCall

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem

# Name of a picture, its first token and how many stand for it.
ShownPicture = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class CallRecipe:
    """A complete message: the call that made it, and those whose messages that call names.

    It holds the recipes that it needs, so what was freed is forgotten when nothing that is left was
    encoded behind it.

    Attributes:
        call: call that encodes the message, all of whose tokens are known.
        parents: recipes of the messages that it lists, and of the one that it copies.
        key: name of the encoding: equal for calls of a tenant that encode the same.
        pictures: pictures among the tokens, in their order.
    """

    call: PlannedCall
    parents: tuple[CallRecipe, ...]
    key: bytes
    pictures: tuple[ShownPicture, ...] = ()

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def num_tokens(self) -> int:
        return len(self.call.token_ids)


def recipe_of(
    call: PlannedCall, token_ids: Sequence[int], recipes: Mapping[str, CallRecipe]
) -> CallRecipe:
    """Recipe of the message that a call makes.

    Args:
        token_ids: tokens of the message.
        recipes: those of the messages that the call names, by id.
    """
    params = replace(call.params, kind="prefill", open_end=False, deny=())
    again = replace(call, token_ids=tuple(token_ids), params=params, sampling_params=None)
    if call.prompt is not None:  # pictures are in the header of an answer
        again = replace(again, prompt=with_tokens(call.prompt, token_ids))
    return bound_recipe(again, recipes)


def bound_recipe(call: PlannedCall, recipes: Mapping[str, CallRecipe]) -> CallRecipe:
    """Recipe of a call that encodes a message all of whose tokens are known.

    Args:
        recipes: those of the messages that the call names, by id.
    """
    parents = {name: recipes[name] for name in named_by(call)}
    pictures = _pictures(call, parents)
    return CallRecipe(call, tuple(parents.values()), _key(call, parents, pictures), pictures)


def named_by(call: PlannedCall) -> list[str]:
    """Ids of the messages that a call names, each once."""
    params = call.params
    copied = [] if params.copy_of is None else [params.copy_of]
    return list(dict.fromkeys([*(span.id for span in params.parents), *copied]))


def _pictures(call: PlannedCall, parents: Mapping[str, CallRecipe]) -> tuple[ShownPicture, ...]:
    """Pictures of a call: those that it was given, or those of the message that it copies."""
    if call.prompt is None:
        return () if call.params.copy_of is None else parents[call.params.copy_of].pictures
    (names,), (places,) = call.prompt["mm_hashes"].values(), call.prompt["mm_placeholders"].values()
    return tuple((n, p.offset, p.length) for n, p in zip(names, places, strict=True))


class SharedPictures:
    """Pictures in recipes: equal ones of a tenant once, for as long as a recipe shows them."""

    def __init__(self) -> None:
        self._items: WeakValueDictionary[str, MultiModalKwargsItem] = WeakValueDictionary()

    def share(self, call: PlannedCall) -> PlannedCall:
        """Return the call with the pictures that recipes have by these names."""
        if call.prompt is None:
            return call
        from vllm.multimodal.inputs import MultiModalKwargsItems

        names = call.prompt["mm_hashes"]
        shared = {
            modality: [
                self._items.setdefault(name, item)
                for name, item in zip(names[modality], items, strict=True)
            ]
            for modality, items in call.prompt["mm_kwargs"].items()
        }
        prompt = {**call.prompt, "mm_kwargs": MultiModalKwargsItems(shared)}
        return replace(call, prompt=cast("MultiModalInput", prompt))


def _key(
    call: PlannedCall, parents: Mapping[str, CallRecipe], pictures: tuple[ShownPicture, ...]
) -> bytes:
    params, adapter = call.params, call.adapter
    spans = [(parents[span.id].key, span.start, span.stop) for span in params.parents]
    content = (
        params.tenant,
        params.reader,
        spans,
        params.offsets,
        params.new_offset,
        params.exact,
        params.repair and params.repair.to_json(),
        params.keep_hidden,
        pictures,
        adapter and (adapter.lora_name, adapter.lora_path),
    )
    digest = blake2b(repr(content).encode(), digest_size=16)
    digest.update(array("q", call.token_ids).tobytes())
    return digest.digest()
