# SPDX-License-Identifier: Apache-2.0
"""Recipes of messages in front of the engines: what it takes to make a message on any of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from vllm_choreo.api.planned import PlannedCall


@dataclass(frozen=True, eq=False)
class CallRecipe:
    """A complete message: the call that made it, and those whose messages that call names.

    It holds the recipes that it needs, so what was freed is forgotten when nothing that is left was
    encoded behind it.

    Attributes:
        call: call that encodes the message, all of whose tokens are known.
        parents: recipes of the messages that it lists, and of the one that it copies.
        key: name of the encoding: equal for calls of a tenant that encode the same.
    """

    call: PlannedCall
    parents: tuple[CallRecipe, ...]
    key: bytes

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
    return bound_recipe(again, recipes)


def bound_recipe(call: PlannedCall, recipes: Mapping[str, CallRecipe]) -> CallRecipe:
    """Recipe of a call that encodes a message all of whose tokens are known.

    Args:
        recipes: those of the messages that the call names, by id.
    """
    parents = {name: recipes[name] for name in named_by(call)}
    return CallRecipe(call, tuple(parents.values()), _key(call, parents))


def named_by(call: PlannedCall) -> list[str]:
    """Ids of the messages that a call names, each once."""
    params = call.params
    copied = [] if params.copy_of is None else [params.copy_of]
    return list(dict.fromkeys([*(span.id for span in params.parents), *copied]))


def _key(call: PlannedCall, parents: Mapping[str, CallRecipe]) -> bytes:
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
        adapter and (adapter.lora_name, adapter.lora_path),
    )
    digest = blake2b(repr(content).encode(), digest_size=16)
    digest.update(array("q", call.token_ids).tobytes())
    return digest.digest()
