# SPDX-License-Identifier: Apache-2.0
"""Calls that a client sent, as `CallSpec`s: text is tokenised, chats are rendered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from vllm_choreo.api.adapters import WithAdapter
from vllm_choreo.api.pictures import pictures_in_data
from vllm_choreo.errors import ChoreoError, LimitError, TooLongError, UnsupportedOptionError
from vllm_choreo.semantics.call import CallSpec, Tokenized
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.server.errors import as_choreo_error
from vllm_choreo.server.pictures import load_pictures
from vllm_choreo.server.schemas import (
    MAX_PARENTS,
    CallBody,
    ChatMessage,
    ParentBody,
    SamplingBody,
)
from vllm_choreo.server.served_adapters import ServedAdapters
from vllm_choreo.server.work_pool import WorkPool

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.renderers.online_renderer import OnlineRenderer

# Texts that are tokenised at once, in about a millisecond: less than a turn in a pool may take.
_FEW_CHARS = 2_000
# Of what a grammar is made of, which vLLM reads before a call is begun, and compiles.
_MAX_STRUCTURED_CHARS = 64 * 2**10
# Of `extra_args`, what the engine itself reads.
_RESERVED = ("choreo", "kv_")
# The options that are objects of vLLM.
_OBJECTS = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


class CallReader:
    """Reads calls for the server's model.

    Args:
        online_renderer: vLLM's renderer, which knows the model's chat template and tokenizer.
        adapters: adapters that calls may name.
        work: pool for work that grows with a text.
    """

    def __init__(
        self, online_renderer: OnlineRenderer, adapters: ServedAdapters, work: WorkPool
    ) -> None:
        self.adapters = adapters
        self._work = work
        self._online = online_renderer
        self._tokenizer = online_renderer.renderer.get_tokenizer()
        self._max_tokens: int = online_renderer.model_config.max_model_len
        self._max_chars: int = self._max_tokens * self._tokenizer.max_chars_per_token

    async def read(
        self, bodies: Sequence[CallBody], tenant: str, adapter: str | None = None
    ) -> list[CallSpec]:
        """The calls of a request, in their order.

        Args:
            bodies: calls that the client sent.
            tenant: tenant that sent them.
            adapter: name of the adapter of calls that name none.

        Raises:
            LimitError: too many parents, or too many that are denied, in all of them together.
            ChoreoError: one of them is illegal in itself.
        """
        for name in ("parents", "deny"):
            count = sum(len(getattr(body, name) or ()) for body in bodies)
            if count > MAX_PARENTS:
                raise LimitError(
                    f"the calls of a request name up to {MAX_PARENTS} messages as {name} together",
                    parameter=name,
                    value=count,
                )
        found = [await self._content(body) for body in bodies]
        tokenized = await self._tokenized(tenant, [c for c, _ in found if isinstance(c, str)])
        texts = iter(tokenized)
        return [
            await self._call(body, next(texts) if isinstance(c, str) else c, pictures, adapter)
            for body, (c, pictures) in zip(bodies, found, strict=True)
        ]

    async def _call(
        self,
        body: CallBody,
        content: Tokenized | tuple[int, ...] | ParentSpan,
        pictures: list[object],
        adapter: str | None,
    ) -> CallSpec:
        return CallSpec(
            body.type,
            content,
            multi_modal_data={"image": pictures} if pictures else None,
            parents=tuple(map(_span, body.parents)),
            offsets=body.offsets,
            new_offset=body.new_offset,
            save_as=body.save_as,
            mode=body.mode,
            deny=tuple(body.deny or ()),
            adapter=await self.adapter_of(body.adapter, adapter),
            repair=body.repair,
            keep_hidden=body.keep_hidden,
            role=body.role,
            sampling_params=sampling_of(body.sampling_params),
        )

    async def adapter_of(
        self, own: str | None, adapter: str | None
    ) -> LoRARequest | WithAdapter | str | None:
        """Resolve the call's own adapter, or else the session's, used where it is placed."""
        if own is not None or adapter is None:
            return await self.adapters.resolve(own)
        return WithAdapter(await self.adapters.resolve(adapter))

    async def _content(
        self, body: CallBody
    ) -> tuple[str | tuple[int, ...] | ParentSpan, list[object]]:
        """New tokens of a call, or their text, and its pictures."""
        _check_form(body)
        if body.copy_of is not None:
            return _span(body.copy_of), []
        content, pictures = body.content, list[object]()
        if body.messages is not None:
            content, pictures = await self._rendered(body.messages, body.type == "decode")
        assert content is not None
        self._check_size(content)
        if body.multi_modal_data is not None:
            given = body.multi_modal_data.image
            urls = [given] if isinstance(given, str) else given
            pictures = await load_pictures(urls, self._online.model_config)
        return content if isinstance(content, str) else tuple(content), pictures

    async def _tokenized(self, tenant: str, texts: Sequence[str]) -> list[Tokenized]:
        """Tokenise texts: long ones in a thread, since a megabyte takes half a second."""

        def encoded() -> list[Tokenized]:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            return [Tokenized(text, tuple(encode(text))) for text in texts]

        if sum(map(len, texts)) <= _FEW_CHARS:
            return encoded()
        return await self._work.run(tenant, encoded)

    def _check_size(self, content: str | list[int]) -> None:
        """Refuse what cannot fit before time is spent on it."""
        is_text = isinstance(content, str)
        limit = self._max_chars if is_text else self._max_tokens
        if len(content) > limit:
            raise TooLongError(
                f"{len(content)} {'characters' if is_text else 'token ids'} do not fit into a "
                f"context of {self._max_tokens} tokens; send less",
                parameter="content",
            )

    async def _rendered(
        self, messages: Sequence[ChatMessage], is_decode: bool
    ) -> tuple[str | list[int], list[object]]:
        """The chat as text, or as token ids where the model's renderer makes them at once.

        And its pictures, of which vLLM's parser has put a placeholder there for each.
        """
        online = self._online
        params = ChatParams(
            chat_template=online.chat_template,
            chat_template_content_format=online.chat_template_content_format,
            chat_template_kwargs={
                **online.default_chat_template_kwargs,
                "add_generation_prompt": is_decode,
                "tokenize": False,
            },
        )
        turns = [message.model_dump() for message in messages]
        try:
            _, prompt = await online.renderer.render_messages_async(turns, params)
        except Exception as error:
            # What a template raises is a matter of the template: an error of any class.
            reason = as_choreo_error(error) or error
            raise ChoreoError(
                f"the model's chat template refuses these messages: {reason}",
                parameter="messages",
            ) from error
        text: str | list[int] = (
            prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        )
        return text, pictures_in_data(prompt.get("multi_modal_data") or {}, "messages")


def sampling_of(body: SamplingBody | None) -> SamplingParams | None:
    """Sampling parameters of a call; None: it gives none.

    Raises:
        ChoreoError: vLLM refuses them.
    """
    if body is None:
        return None
    fields = body.model_dump(exclude_none=True)
    for key in fields.get("extra_args", {}):
        if key.startswith(_RESERVED):
            raise UnsupportedOptionError(
                "the engine's own arguments are no options of a call",
                parameter=f"sampling_params.extra_args.{key}",
            )
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(key): bias for key, bias in fields["logit_bias"].items()}
    try:
        for name in _OBJECTS.keys() & fields.keys():
            _check_small(name, fields[name])
            fields[name] = _object(name, fields[name])
        return SamplingParams(**fields)
    except Exception as error:
        ours = as_choreo_error(error)
        if ours is None:
            raise
        raise ours from error


def _check_small(name: str, given: dict[str, Any]) -> None:
    """Check that an option is short enough to be read at once.

    Raises:
        LimitError: vLLM would take long to read it, and nobody would be served meanwhile.
    """
    num_chars = len(json.dumps(given))
    if num_chars > _MAX_STRUCTURED_CHARS:
        raise LimitError(
            f"this option has up to {_MAX_STRUCTURED_CHARS} characters as JSON: ask for less",
            parameter=f"sampling_params.{name}",
            value=f"{num_chars} characters",
        )


def _object(
    name: str, given: dict[str, Any]
) -> StructuredOutputsParams | RepetitionDetectionParams:
    """Make an object of vLLM from its public fields alone."""
    made = _OBJECTS[name]
    known = [field.name for field in dataclasses.fields(made) if not field.name.startswith("_")]
    for key in given:
        if key not in known:
            raise UnsupportedOptionError(
                f"unknown field; the fields are {', '.join(known)}",
                parameter=f"sampling_params.{name}.{key}",
                value=given[key],
            )
    return made(**given)


def _check_form(body: CallBody) -> None:
    given = [name for name in ("content", "messages", "copy_of") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ChoreoError(
            "a call needs exactly one of content, messages and copy_of",
            parameter="content",
            value=", ".join(given) or None,
        )
    if body.multi_modal_data is not None and body.content is None:
        raise ChoreoError(
            "these are the pictures of content: send those of a chat as parts of its turns; a copy "
            "has those of its message",
            parameter="multi_modal_data",
            value=given[0],
        )
    if body.copy_of is not None and body.type == "decode":
        raise ChoreoError(
            'a copy samples nothing: call it with "type": "prefill"',
            parameter="type",
            value=body.type,
        )


def _span(parent: str | ParentBody) -> ParentSpan:
    if isinstance(parent, str):
        return ParentSpan(parent)
    return ParentSpan(parent.id, parent.start, parent.stop)
