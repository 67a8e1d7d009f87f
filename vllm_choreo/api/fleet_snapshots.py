# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of a session over several engines: each goes through one of them.

A save has one engine know all its messages, most of which lie there already; a load goes to the
engine that has least to do. Recipes of what is loaded are then in front of the engines, as those of
what was made here: so any engine can be given the messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm_choreo.api.one_engine import OneEngine, ask_engine
from vllm_choreo.api.picture_prompts import picture_prompt
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.recipes import CallRecipe, bound_recipe
from vllm_choreo.errors import UnsupportedOptionError
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.provenance import Trace

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalFeatureSpec

# Of the operation "snapshot_begin".
_BeginArguments = tuple[str, str, Mapping[str, Any], Mapping[str, int]]


class Loaded(NamedTuple):
    """A message that was loaded, and whether its keys and values were."""

    recipe: CallRecipe
    has_data: bool


@dataclass
class SnapshotEngine:
    """The engine that a save or a load goes through, in one life of it.

    Attributes:
        number: number of the engine.
        one: the engine, as operations take it.
        loading: messages that are being loaded, by their load's ticket.
    """

    number: int
    one: OneEngine
    loading: dict[int, list[Loaded]] = field(default_factory=dict)

    async def ask(self, operation: str, *args: object) -> object:
        """Run an operation. Raises ChoreoError: it is refused."""
        if operation != "snapshot_begin":
            return await ask_engine(self.one, operation, *args)
        messages = loaded_messages(*cast(_BeginArguments, args))
        ticket = await ask_engine(self.one, operation, *args)
        assert isinstance(ticket, int)
        self.loading[ticket] = messages
        return ticket


# Of the save or load that the running task does, and of the calls that it makes.
SNAPSHOT_ENGINE: ContextVar[SnapshotEngine | None] = ContextVar("SNAPSHOT_ENGINE", default=None)


def loaded_messages(
    session: str, tenant: str, recipes: Mapping[str, Any], named: Mapping[str, int]
) -> list[Loaded]:
    """Messages that a load names, with recipes by which any engine can make them again.

    Args:
        session, tenant, recipes, named: as the operation "snapshot_begin" takes them.

    Raises:
        UnsupportedOptionError: no call would make one of them again as it was.
    """
    entries: Sequence[Mapping[str, Any]] = recipes["encodings"]
    shown = _features(recipes.get("pictures", ()))
    for number in _needed(entries, named.values()):
        _check_makeable(entries[number], shown)
    unnamed = f"{session}/loaded-{secrets.token_hex(8)}"
    ids = {number: message_id for message_id, number in named.items()}
    made: list[CallRecipe] = []
    for number, entry in enumerate(entries):
        message_id = ids.get(number, f"{unnamed}-{number}")
        parents = [made[parent] for parent in entry["parents"]]
        params = ChoreoParams(
            parents=tuple(
                ParentSpan(parent.id, start, stop)
                for parent, (start, stop, _) in zip(parents, entry["spans"], strict=True)
            ),
            offsets=tuple(offset for _, _, offset in entry["spans"]),
            new_offset=max(0, entry["new_offset"]),  # below 0 in what nobody needs alone
            save_as=message_id,
            kind="prefill",
            session=session,
            tenant=tenant,
            keep_hidden=tuple(entry["keeps"]),
        )
        prompt = _prompt(entry, shown)
        tokens, trace = tuple(entry["tokens"]), Trace(message_id)
        call = PlannedCall("", tokens, params, None, trace, prompt=prompt)
        made.append(bound_recipe(call, {parent.id: parent for parent in parents}))
    return [Loaded(made[number], entries[number]["data"] is not None) for number in ids]


def _needed(entries: Sequence[Mapping[str, Any]], named: Iterable[int]) -> set[int]:
    """Numbers of encodings that are named, and of those behind which they were made."""
    found, stack = set[int](), list(named)
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack += entries[number]["parents"]
    return found


def _features(pictures: Sequence[Mapping[str, Any]]) -> list[MultiModalFeatureSpec]:
    """Pictures as vLLM has them, each at the beginning of a prompt."""
    if not pictures:
        return []
    from vllm_choreo.engine.picture_files import picture_of

    return [picture_of(entry["content"], entry["name"]) for entry in pictures]


def _prompt(
    entry: Mapping[str, Any], shown: Sequence[MultiModalFeatureSpec]
) -> MultiModalInput | None:
    """The tokens of an encoding with the pictures among them; None: there are none."""
    pictures = [(shown[number], start) for number, start in entry.get("pictures", ())]
    if not pictures:
        return None
    return picture_prompt(
        list(entry["tokens"]),
        [feature.data for feature, _ in pictures],
        [feature.identifier for feature, _ in pictures],
        [replace(feature.mm_position, offset=start) for feature, start in pictures],
    )


def _cuts_a_picture(entry: Mapping[str, Any], shown: Sequence[MultiModalFeatureSpec]) -> bool:
    """Return whether an encoding begins or ends inside of a picture."""
    pictures = [(shown[number], start) for number, start in entry.get("pictures", ())]
    num_tokens = len(entry["tokens"])
    return any(
        start < 0 or start + feature.mm_position.length > num_tokens for feature, start in pictures
    )


def _check_makeable(entry: Mapping[str, Any], shown: Sequence[MultiModalFeatureSpec]) -> None:
    """Check that a prefill makes an encoding again.

    Raises:
        UnsupportedOptionError: none would.
    """
    if entry["patch"] is not None or entry["weights"] is not None:
        reason = "tokens of it were repaired"
    elif entry["adapter"] is not None:
        reason = "an adapter, or another model, has encoded it"
    elif entry["is_untrusted"]:
        reason = "its keys and values come from somebody whose key this process does not have"
    elif _cuts_a_picture(entry, shown):
        reason = "it begins or ends inside of a picture"
    else:
        return
    raise UnsupportedOptionError(
        f"an engine of several could not make this message again ({reason}): load it where there "
        "is one engine (--data-parallel-size 1), or have it encoded anew (on_mismatch='encode')",
        parameter="uri",
        value=entry["message"],
    )
