# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of routes that save and load messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_choreo.server.schemas import MAX_PARENTS, BodyModel, MessageId
from vllm_choreo.wire.answer import AnswerObject, Doc

KeptName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        description="1 to 128 letters, digits and `_ . -`; the operator decides where that is.",
        examples=["library"],
    ),
]


class SaveBody(BodyModel):
    """Messages to save."""

    name: KeptName
    messages: Annotated[list[MessageId], Field(fail_fast=True, max_length=MAX_PARENTS)] | None = (
        Field(None, description="By default all of the session.")
    )
    encodings: bool = Field(
        False, description="Save keys and values, too: with them nothing is encoded again."
    )


class LoadBody(BodyModel):
    """Saved messages to load."""

    name: KeptName
    on_mismatch: Literal["refuse", "encode", "variant"] = Field(
        "refuse",
        description="What becomes of keys and values that another model made, or that were "
        "damaged: the request is refused, or their messages are encoded when they are read; those "
        "of a variant of the model are taken as they are.",
    )


# -- answers -------------------------------------------------------------------------------------


class SavedAnswer(AnswerObject):
    """Messages that were saved."""

    name: str
    object: Literal["choreo.kept"]
    messages: int
    encodings: Annotated[int, Doc("With keys and values.")]
    tokens: int
    bytes: Annotated[int, Doc("Of keys and values.")]


class SavedEntry(AnswerObject):
    """Messages that are saved under a name."""

    name: str
    object: Literal["choreo.kept"]
    bytes: Annotated[
        int, Doc("That it takes: recipes, keys and values, and what was never finished.")
    ]


class SavedDeletedAnswer(AnswerObject):
    """Messages that were saved, and are not any more."""

    name: str
    object: Literal["choreo.kept.deleted"]
    deleted: Literal[True]
