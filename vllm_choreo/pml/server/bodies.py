# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of the routes of schemas and prompts, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_choreo.server.documents import AnswerModel, MessageAnswer, UsageAnswer
from vllm_choreo.server.schemas import (
    MAX_PARENTS,
    Adapter,
    BodyModel,
    MessageId,
    SamplingBody,
)

_MAX_MESSAGES = 1024

SchemaName = Annotated[str, Field(min_length=1, max_length=128, examples=["travel"])]


class SchemaBody(BodyModel):
    """A schema to register."""

    markup: str = Field(
        description="`<schema name=…>…</schema>`; see docs/pml.md.",
        examples=['<schema name="s"><module name="a">Anna owns a bicycle.</module></schema>'],
    )
    context: Literal["modules", "schema"] = Field(
        "modules",
        description="What modules are encoded behind: nothing, or the text that is always there "
        "with them.",
    )
    encode: bool = Field(
        False,
        description="Encode it now, in the session of requests that name none; by default what a "
        "prompt takes is encoded with the first one.",
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


class ParamAnswer(AnswerModel):
    """A parameter of a module."""

    name: str
    length: int = Field(description="The most tokens that an argument has.")


class ModuleAnswer(AnswerModel):
    """A module of a schema, and the positions that it takes."""

    path: str = Field(examples=["plan/tokyo"])
    start: int
    stop: int
    num_tokens: int = Field(description="Its own, those of modules inside it left out.")
    cached: bool = Field(description="Whether it is encoded once, or with each prompt.")
    params: list[ParamAnswer]


class ShortSchemaAnswer(AnswerModel):
    """A schema in the list of a tenant's."""

    id: str = Field(description="Its name.")
    object: Literal["choreo.schema"]
    created: int = Field(description="Seconds since 1970.")
    owner: Literal["tenant", "operator"]
    context: Literal["modules", "schema"]
    num_tokens: int
    num_positions: int
    num_modules: int


class SchemaAnswer(ShortSchemaAnswer):
    """A schema."""

    modules: list[ModuleAnswer]
    markup: str
    outline: str = Field(
        description="As a tree, with what is encoded in the session of requests that name none."
    )


class SchemaListAnswer(AnswerModel):
    """The schemas that a tenant can name."""

    object: Literal["list"]
    data: list[ShortSchemaAnswer]


class DeletedSchemaAnswer(AnswerModel):
    """A schema that was deleted."""

    id: str
    object: Literal["choreo.schema.deleted"]
    deleted: Literal[True]


class PromptUsageAnswer(UsageAnswer):
    """Tokens of a prompt, by where they came from, beside those of its last call."""

    module_tokens: int = Field(description="Of modules, and of the text that all prompts have.")
    argument_tokens: int
    new_tokens: int = Field(
        description="Of new text, of modules that are not cached, and of the chat template."
    )
    message_tokens: int = Field(description="Of messages that the prompt names.")


class PromptAnswerBody(MessageAnswer):
    """The message that a prompt made."""

    usage: PromptUsageAnswer
