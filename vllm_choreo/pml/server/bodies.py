# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of the routes of schemas and prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from vllm_choreo.server.schemas import (
    MAX_PARENTS,
    Adapter,
    BodyModel,
    MessageId,
    SamplingBody,
)
from vllm_choreo.wire.answer import AnswerObject, Doc
from vllm_choreo.wire.messages import MessageFields, UsageAnswer

_MAX_MESSAGES = 1024

Context: TypeAlias = Literal["modules", "schema"]


class SchemaBody(BodyModel):
    """A schema to register."""

    markup: str = Field(
        description="`<schema name=…>…</schema>`; see docs/pml.md.",
        examples=['<schema name="s"><module name="a">Anna owns a bicycle.</module></schema>'],
    )
    context: Context = Field(
        "modules",
        description="What modules are encoded behind: nothing, or the text that is always there "
        "with them.",
    )
    encode: bool = Field(
        False,
        description="Encode it now, in the session of requests that name none; by default what a "
        "prompt takes is encoded with the first one.",
    )


class PrefetchBody(BodyModel):
    """Unions of a schema to bring into the KV cache."""

    module: str = Field(
        max_length=4096,
        description="The path of a module in one of them; all members of these unions are brought.",
        examples=["plan/tokyo"],
    )
    session: str | None = Field(
        None, max_length=256, description="By default the session of requests that name none."
    )


class PromptBody(BodyModel):
    """A prompt of a registered schema."""

    prompt: str = Field(
        description="`<prompt schema=…>…</prompt>`; see docs/pml.md.",
        examples=['<prompt schema="s"><a/>What is Anna’s?</prompt>'],
    )
    session: str | None = Field(
        None, max_length=256, description="By default the session of requests that name none."
    )
    layout: Literal["schema", "compact"] | None = Field(
        None,
        description="`schema`: positions are those of the schema. `compact`: there are no gaps, "
        "and modules come in the prompt's order; by default in exact and in baseline mode.",
    )
    messages: Annotated[dict[str, MessageId], Field(max_length=_MAX_MESSAGES)] | None = Field(
        None,
        description="The session's messages that the prompt names by `<message name=…/>`; one that "
        "is left out is the message of that name.",
    )
    mode: Literal["choreo", "exact"] | None = Field(
        None, description="By default that of the session."
    )
    repair: str | dict[str, Any] | None = Field(
        None, description="A rule, see docs/repair.md; by default that of the session."
    )
    adapter: Adapter | None = Field(None, description="By default that of the session.")
    deny: Annotated[list[MessageId], Field(fail_fast=True, max_length=MAX_PARENTS)] | None = Field(
        None, description="Messages of which the prompt may read no trace."
    )
    save_as: str | None = Field(
        None,
        description="A name for the answer's message.",
        json_schema_extra={"pattern": r"^(?!\d+$)[A-Za-z0-9_.:-]{1,128}$"},
    )
    sampling_params: SamplingBody | None = Field(
        None, description="By default those that the model recommends."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")


# -- answers -------------------------------------------------------------------------------------


class ParamAnswer(AnswerObject):
    """A parameter of a module."""

    name: str
    length: Annotated[int, Doc("The most tokens that an argument has.")]


class ModuleAnswer(AnswerObject):
    """A module of a schema, and the positions that it takes."""

    path: Annotated[str, Doc(example="plan/tokyo")]
    start: int
    stop: int
    num_tokens: Annotated[int, Doc("Its own, those of modules inside it left out.")]
    cached: Annotated[bool, Doc("Whether it is encoded once, or with each prompt.")]
    params: list[ParamAnswer]


class ShortSchemaAnswer(AnswerObject):
    """A schema in the list of a tenant's."""

    id: Annotated[str, Doc("Its name.")]
    object: Literal["choreo.schema"]
    created: Annotated[int, Doc("Seconds since 1970.")]
    owner: Literal["tenant", "operator"]
    context: Context
    num_tokens: int
    num_positions: int
    num_modules: int


class SchemaAnswer(ShortSchemaAnswer):
    """A schema."""

    modules: list[ModuleAnswer]
    markup: str
    outline: Annotated[
        str, Doc("As a tree, with what is encoded in the session of requests that name none.")
    ]


class DeletedSchemaAnswer(AnswerObject):
    """A schema that was deleted."""

    id: str
    object: Literal["choreo.schema.deleted"]
    deleted: Literal[True]


class PrefetchedAnswer(AnswerObject):
    """Unions of a schema that are in the KV cache now."""

    id: Annotated[str, Doc("The name of the schema.")]
    object: Literal["choreo.schema.prefetched"]
    module: str
    encoded: Annotated[int, Doc("Segments that were encoded for the first time.")]


class PromptUsageAnswer(UsageAnswer):
    """Tokens of a prompt, by where they came from, beside those of its last call."""

    module_tokens: Annotated[int, Doc("Of modules, and of the text that all prompts have.")]
    argument_tokens: int
    new_tokens: Annotated[
        int, Doc("Of new text, of modules that are not cached, and of the chat template.")
    ]
    message_tokens: Annotated[int, Doc("Of messages that the prompt names.")]


class PromptAnswerBody(MessageFields):
    """The message that a prompt made."""

    usage: PromptUsageAnswer
