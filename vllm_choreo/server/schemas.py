# SPDX-License-Identifier: Apache-2.0
"""Bodies that clients send, as pydantic models: checked strictly, and described in /openapi.json.

They check types and sizes; what a call means is checked by the session (`vllm_choreo.api.session`).
Tags of unions stand in angle brackets, by which `body.py` leaves them out of error messages.
pydantic reports all errors that there are, which takes seconds if there are a million: so lists end
at the first one, and objects have a bounded number of fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_choreo.semantics.call import MAX_ROLE_CHARS
from vllm_choreo.trained_adapter import current_placement

# Of one request, in all of its calls together: planning them takes a second.
MAX_PARENTS = 100_000
# Of a message; more than models have.
MAX_HIDDEN_LAYERS = 1_000
# Beyond these, numbers do not fit into the engine's messages, and have no meaning.
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**63 - 1
_MAX_ID_CHARS = 256
_MAX_VOCABULARY = 2**18  # about as many as any model has
_MAX_FIELDS = 1024
_MAX_PICTURES = 1024  # of a call; vLLM's --limit-mm-per-prompt is less


def _few_fields(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise PydanticCustomError("too_long", f"an object has up to {_MAX_FIELDS} fields")
    return value


Url = Annotated[str, Field(min_length=1)]
Position = Annotated[int, Field(ge=0, le=_MAX_INT)]
Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MessageId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=_MAX_ID_CHARS,
        description="The id of a message, or its name (the part after `session/`).",
    ),
]


class BodyModel(BaseModel):
    """Unknown fields and values of another type are refused, not ignored or converted."""

    model_config = ConfigDict(strict=True, extra="forbid")
    _bounded = model_validator(mode="before")(_few_fields)


# -- sessions and pins ---------------------------------------------------------------------------


Adapter = Annotated[
    str,
    Field(
        min_length=1,
        max_length=_MAX_ID_CHARS,
        description="A LoRA adapter that the server knows, by its name; the model's name: none.",
    ),
]


Repair = Annotated[
    str | dict[str, Any] | list[Any],
    Field(
        description=(
            "Which tokens of the parents are encoded anew in the call's own context: `first:32`, "
            "`all`, `none`, `{share, by: attention}`, `{share, by: random, seed}`, "
            "`{layers: [first, stop]}`, `{layers: [[first, stop], …]}`, or runs (start, stop), one "
            "list per parent; or none, and parents count by other weights: `{reweight: "
            "[temperature, scale]}`."
        ),
        examples=["first:32"],
    ),
]


class SessionBody(BodyModel):
    """A session to open."""

    mode: Literal["choreo", "exact", "baseline"] = Field(
        "choreo",
        description=(
            "`choreo`: messages are read as they were encoded. `exact`: every result is that of an "
            "ordinary request on the concatenated text. `baseline`: ordinary requests, for "
            "comparison."
        ),
    )
    ttl_seconds: Seconds | None = Field(
        None,
        description=(
            "The session is closed when nobody used it for as long; by default the server's "
            "setting `session_ttl_seconds`, which is also the most."
        ),
        examples=[600],
    )
    adapter: Adapter | None = Field(None, description="Of calls that name none.")
    placement: Annotated[
        Literal["prefill", "decode", "both"] | None, BeforeValidator(current_placement)
    ] = Field(
        None,
        description=(
            "Which calls use the adapter: `prefill`: those that encode messages; `decode`: those "
            "that generate; `both`. By default as training has written into its folder; `both` if "
            "it has not."
        ),
    )
    repair: Repair | None = Field(
        None,
        description="The rule of calls that name none; also a policy, or the profile of a pair.",
    )


class PinBody(BodyModel):
    """How long to pin a message."""

    ttl_seconds: Seconds | None = Field(
        None,
        description="By default the server's setting `max_pin_seconds`, which is also the most.",
        examples=[60],
    )


class MessagesListBody(BodyModel):
    """Messages of the session."""

    messages: Annotated[list[MessageId], Field(fail_fast=True, max_length=MAX_PARENTS)]


class PinListBody(MessagesListBody, PinBody):
    """Messages of the session, and how long to pin them."""


# -- calls ---------------------------------------------------------------------------------------


class ParentBody(BodyModel):
    """Some of a message's tokens."""

    id: MessageId
    start: Count | None = Field(None, description="The first token; by default 0.")
    stop: Count | None = Field(None, description="One after the last token; by default the end.")


class TextPart(BodyModel):
    """Text in a turn of a chat."""

    type: Literal["text"]
    text: str


class ImageUrl(BodyModel):
    """Address of a picture."""

    url: Url
    detail: Literal["auto"] = Field("auto", description="Pictures are shown as the model has them.")


class ImagePart(BodyModel):
    """A picture in a turn of a chat."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _kind(value: object) -> str | None:
    """The tag of a value that is text, a list, or an object."""
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    return "<object>" if isinstance(value, (dict, BaseModel)) else None


def _one_of(message: str) -> Discriminator:
    return Discriminator(_kind, custom_error_type="wrong_type", custom_error_message=message)


def _type_of(value: object) -> str | None:
    """The tag of a part of a turn, by its type."""
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{given}>" if given in ("text", "image_url") else None


TurnPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(
        _type_of,
        custom_error_type="wrong_type",
        custom_error_message='a part of a turn has the type "text" or "image_url"',
    ),
]


class ChatMessage(BodyModel):
    """One turn of a chat."""

    role: str = Field(max_length=64, examples=["user"])
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[TurnPart], Field(fail_fast=True, min_length=1, max_length=10_000), Tag("<list>")
        ],
        _one_of("send text or a list of parts"),
    ]


Turns = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=10_000)]


class MultiModalBody(BodyModel):
    """Pictures of `content`."""

    image: Annotated[
        Annotated[Url, Tag("<text>")]
        | Annotated[
            list[Url], Field(fail_fast=True, min_length=1, max_length=_MAX_PICTURES), Tag("<list>")
        ],
        _one_of("send the address of a picture, or a list of them"),
    ] = Field(
        description=(
            "Addresses of pictures, `data:`, `https:` or `http:`, one for each placeholder of the "
            "model's in `content`, in their order."
        ),
        examples=[["data:image/png;base64,iVBORw0KGgo="]],
    )


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TokenId], Field(fail_fast=True), Tag("<list>")],
    _one_of("send text or a list of token ids"),
]
Parent = Annotated[
    Annotated[MessageId, Tag("<text>")] | Annotated[ParentBody, Tag("<object>")],
    _one_of('a parent is an id, or {"id": ..., "start": ..., "stop": ...}'),
]
Strings = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True, max_length=64), Tag("<list>")],
    _one_of("send a string or a list of strings"),
]
Offsets = Annotated[list[Position | None], Field(fail_fast=True, max_length=MAX_PARENTS)]
_Biases = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Number]


class SamplingBody(BodyModel):
    """How to generate: fields of vLLM's `SamplingParams`, with its defaults."""

    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = Field(
        None, description="By default 16.", examples=[64]
    )
    min_tokens: Count | None = None
    temperature: Number | None = Field(None, description="By default 1; 0 is greedy.", examples=[0])
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = None
    min_p: Number | None = None
    seed: Annotated[int, Field(ge=-_MAX_SEED, le=_MAX_SEED)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    stop: Strings | None = Field(None, examples=[["\n"]])
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=1024)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, max_length=_MAX_VOCABULARY)] | None
    ) = None
    logit_bias: Annotated[_Biases, BeforeValidator(_few_fields)] | None = Field(
        None, description="From token ids to what is added to their logits."
    )
    logprobs: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = Field(
        None, description="How many of the likeliest tokens are answered for each position."
    )
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = (
        None
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="Fields of vLLM's `StructuredOutputsParams`.",
        examples=[{"choice": ["yes", "no"]}],
    )
    repetition_detection: dict[str, Any] | None = Field(
        None, description="Fields of vLLM's `RepetitionDetectionParams`."
    )
    thinking_token_budget: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = None
    extra_args: dict[str, Any] | None = Field(
        None, description="For plugins of the server, such as custom logits processors."
    )
    n: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = Field(
        None, description="1: each call makes one message."
    )
    prompt_logprobs: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = Field(
        None,
        description="Likeliest tokens to report at each token sent, but for the first.",
    )


class CallBody(BodyModel):
    """One call. It needs exactly one of `content`, `messages` and `copy_of`."""

    type: Literal["prefill", "decode"] = Field(
        "decode",
        description=(
            "`prefill` encodes a message; `decode` encodes one and generates after it, and the "
            "message is both."
        ),
    )
    content: Content | None = Field(
        None,
        description="Text, tokenised without special tokens added, or token ids.",
        examples=["Anna owns a red bicycle.\n"],
    )
    messages: Turns | None = Field(
        None,
        description=(
            "Turns of a chat, rendered with the model's chat template; a decode generates the next "
            "turn."
        ),
    )
    multi_modal_data: MultiModalBody | None = Field(
        None, description="Pictures of `content`, in place of its placeholders for them."
    )
    copy_of: Parent | None = Field(
        None, description="A message whose tokens are encoded anew, with these parents (prefill)."
    )
    parents: Annotated[list[Parent], Field(fail_fast=True, max_length=MAX_PARENTS)] = Field(
        default=[],
        description=(
            "The messages that the new one reads, in any order. In a list of calls they may be "
            "named by the `save_as` of calls that stand before."
        ),
    )
    offsets: Offsets | None = Field(
        None,
        description=(
            "The position at which each parent is seen; null in place of one: after the parent "
            "before it. By default all of them so, the first from 0."
        ),
        examples=[[0, None, 40]],
    )
    new_offset: Position | None = Field(
        None, description="The position of the first new token; by default after the last parent."
    )
    save_as: str | None = Field(
        None,
        description="A name for the message: its id is `session/name`. By default a number.",
        json_schema_extra={"pattern": r"^(?!\d+$)[A-Za-z0-9_.:-]{1,128}$"},
        examples=["facts"],
    )
    mode: Literal["choreo", "exact"] | None = Field(
        None, description="By default that of the session."
    )
    deny: Annotated[list[MessageId], Field(fail_fast=True, max_length=MAX_PARENTS)] | None = Field(
        None, description="Messages of which the call may read no trace."
    )
    adapter: Adapter | None = Field(
        None,
        description=(
            "The LoRA adapter that encodes the new tokens and generates; by default that of the "
            "session, where it is placed. Parents are read as they were encoded. The name of the "
            "model stands for none."
        ),
    )
    repair: Repair | None = Field(
        None, description="By default that of the session; see docs/repair.md."
    )
    keep_hidden: Annotated[list[int], Field(max_length=MAX_HIDDEN_LAYERS)] | None = Field(
        None, description="Layers from which on later calls may repair the new message by layers."
    )
    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)] | None = Field(
        None, description="What the new message is in its workflow: a policy of repair goes by it."
    )
    sampling_params: SamplingBody | None = Field(
        None, description="Of a decode; by default those that the model recommends."
    )


class OneCallBody(CallBody):
    """One call, answered with its message."""

    stream: bool = Field(False, description="Answer with server-sent events.")


class CallsBody(BodyModel):
    """Calls that run at once, each as soon as the messages that it reads are complete."""

    calls: Annotated[list[CallBody], Field(fail_fast=True, min_length=1)]
    stream: bool = Field(False, description="Answer with server-sent events.")


def _has_calls(value: object) -> str:
    has_calls = "calls" in value if isinstance(value, dict) else isinstance(value, CallsBody)
    return "<calls>" if has_calls else "<call>"


MessagesBody = Annotated[
    Annotated[OneCallBody, Tag("<call>")] | Annotated[CallsBody, Tag("<calls>")],
    Discriminator(_has_calls),
]
