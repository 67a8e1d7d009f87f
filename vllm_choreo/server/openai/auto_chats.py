# SPDX-License-Identifier: Apache-2.0
"""`choreo_auto`: requests to vLLM's routes whose messages are found by what they hold."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_choreo.api.picture_prompts import pictures_of
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.marks import marked, with_blank_pictures
from vllm_choreo.chat.matching import Matching
from vllm_choreo.chat.parts import ChatPicture, Split, split_given_parts
from vllm_choreo.errors import (
    ChoreoError,
    EmptyTokensError,
    TooLongError,
    UnsupportedOptionError,
)
from vllm_choreo.server.auto_messages import TenantChats
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.openai.auto_client import AutoClient
from vllm_choreo.server.openai.auto_options import (
    AUTO_HEADER,
    AUTO_KEY,
    AUTO_KEYS,
    AutoOptions,
    read_options,
)
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.openai.pictures import without_pictures
from vllm_choreo.server.openai.reading import check_form, read_sent
from vllm_choreo.server.running import Run
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.server.wings import Body

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.inputs.engine import EngineInput
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM


class AutoChats:
    """Chats that name no messages, on one server.

    Args:
        chats: the messages of its tenants.
        llm: an engine client that takes choreographed requests.
        default, default_cut: the mode of requests that say none, and where their parts end.
        default_context: behind what parts are encoded in mode "choreo", where a request says
            nothing of it.
    """

    def __init__(
        self,
        chats: TenantChats,
        llm: AsyncLLM,
        default: str,
        default_cut: str = "messages",
        default_context: str = "seen",
    ) -> None:
        self._chats = chats
        self._llm = llm
        self._default = default
        self._default_cut = default_cut
        self._default_context = default_context
        self._cutter: Cutter | None = None

    async def client(
        self, serving: OpenAIServingChat, body: ChatCompletionRequest, request: Request | None
    ) -> CallClient | None:
        """The engine client of a chat whose messages are to be found; None: it is no such chat.

        Args:
            serving: the handler of the request.
            body, request: the request, read and as sent. Its keys for us are taken out of `body`.

        Raises:
            ChoreoError: the request asks for what cannot be done.
        """
        if request is None:
            return None
        options = read_options(body.vllm_xargs, request.headers.get(AUTO_HEADER), self._default)
        if options is None:
            return None
        options = replace(options, cut=options.cut or self._default_cut)
        split = partial(self._split, serving, body, options, tenant_of(request))
        return await self._client(body, request, options, split)

    async def client_of_parts(
        self, serving: OpenAIServingCompletion, body: CompletionRequest, request: Request | None
    ) -> CallClient | None:
        """The engine client of a completion whose prompt is a list of parts; None: no such one.

        Args:
            serving, body, request: the same as for `client`. The prompt of `body` becomes one of
                all parts.

        Raises:
            ChoreoError: as `client`, or there are no parts.
        """
        if request is None or AUTO_KEY not in choreo_keys(body.vllm_xargs):
            return None
        options = read_options(body.vllm_xargs, None, "off")
        assert options is not None, "the key is there"
        if options.mode == "off":
            return await self._client(body, request, options, None)
        check_parts(serving, body.prompt)
        split = await self._chats.work.run(
            tenant_of(request), self._split_parts, serving, body.prompt, options
        )
        body.prompt = list(split.token_ids)

        async def as_given(prompt: EngineInput) -> Split:
            if tuple(prompt["prompt_token_ids"]) == split.token_ids:
                return split
            return Split(tuple(prompt["prompt_token_ids"]), reason="tokenizer")  # truncated

        return await self._client(body, request, options, as_given)

    async def _client(
        self,
        body: Body,
        request: Request,
        options: AutoOptions,
        split: Callable[[EngineInput], Awaitable[Split]] | None,
    ) -> CallClient | None:
        if options.is_asked:
            # Of equal keys, parsers differ in which one counts.
            await read_sent(request, self._chats.work, self._chats.max_request_bytes)
        others = {k: v for k, v in (body.vllm_xargs or {}).items() if k not in AUTO_KEYS}
        body.vllm_xargs = others or None
        if options.mode == "off" or split is None:
            return None
        try:
            check_form(body)
            messages = self._chats.of(tenant_of(request))
        except ChoreoError as error:
            if options.is_asked:
                raise
            is_form = isinstance(error, UnsupportedOptionError)
            self._chats.looked_up("options" if is_form else "limit", {})
            return None
        run = Run(messages.sessions, messages.session)
        how = self._matching(options)
        return AutoClient(self._llm, run, messages, options, how, split, self._chats.looked_up)

    def _matching(self, options: AutoOptions) -> Matching:
        """How the parts of a chat are matched; the adapter comes with its prompt."""
        return Matching.of(
            options.mode,
            options.cut or "messages",
            options.context or self._default_context,
            self._chats.keeps_states,
            "",
            options.repair,
        )

    async def _split(
        self,
        serving: OpenAIServingChat,
        body: ChatCompletionRequest,
        options: AutoOptions,
        tenant: str,
        prompt: EngineInput,
    ) -> Split:
        """Split a chat that vLLM has rendered, by rendering it once more, with marks."""
        online, token_ids = serving.online_renderer, prompt["prompt_token_ids"]
        messages, contents = marked(body.messages)
        pictures = list[ChatPicture]()
        if prompt["type"] == "multimodal":
            messages, pictures = with_blank_pictures(messages), pictures_of(prompt)
            online = without_pictures(online)
        same = body.model_copy(update={"messages": messages, "kv_transfer_params": None})
        try:
            rendered = await online.render_chat(same)
        except ValueError:  # a template that wants its contents to be of some form
            return Split(tuple(token_ids), reason="template")
        if isinstance(rendered, ErrorResponse):
            return Split(tuple(token_ids), reason="template")
        _, (marks,) = rendered
        text = marks.get("prompt") or marks["prompt_token_ids"]
        split = self._cutter_of(online).split
        return await self._chats.work.run(
            tenant, split, token_ids, prompt.get("prompt"), text, contents, options.min_tokens,
            options.cut, self._matching(options).is_alone, pictures,
        )  # fmt: skip

    def _split_parts(
        self,
        serving: OpenAIServingCompletion,
        prompt: Sequence[str | list[int]],
        options: AutoOptions,
    ) -> Split:
        """Split a prompt that is given in parts; those are cut if the request itself says so."""
        split = split_of_parts(serving, prompt, options.min_tokens)
        if options.cut != "content":
            return split
        return self._cutter_of(serving.online_renderer).cut_content(split)

    def _cutter_of(self, online: OnlineRenderer) -> Cutter:
        if self._cutter is None:
            # A copy of its own: it is used in threads, beside vLLM's.
            tokenizer = copy.deepcopy(online.renderer.get_tokenizer())
            ends = end_tokens(tokenizer, online.model_config.try_get_generation_config())
            chats = self._chats
            self._cutter = Cutter(tokenizer, ends, chats.min_tokens, cut_tokens=chats.cut_tokens)
        return self._cutter


def split_of_parts(
    serving: OpenAIServingCompletion, prompt: Sequence[str | list[int]], min_tokens: int | None
) -> Split:
    """The parts of a completion's prompt, each tokenised by itself; the last one is the header.

    Args:
        prompt: parts that `check_parts` has accepted.
        min_tokens: shorter parts are joined; None: none are.

    Raises:
        EmptyTokensError: a part has no tokens.
    """
    encode = serving.online_renderer.renderer.get_tokenizer().encode
    parts = [p if isinstance(p, list) else encode(p, add_special_tokens=False) for p in prompt]
    if not all(parts):
        raise EmptyTokensError(
            "each part needs at least one token", parameter="header", value=parts.index([])
        )
    return split_given_parts(parts, min_tokens or 1)


def check_parts(serving: OpenAIServingCompletion, prompt: str | list[Any]) -> None:
    """Refuse a prompt that is no list of parts or cannot fit, before time is spent on it.

    Args:
        prompt: a list of texts, or of lists of token ids.

    Raises:
        UnsupportedOptionError: it is no such list, or has fewer than two parts.
        TooLongError: they do not fit into the context, whatever their tokens are.
    """
    is_parts = isinstance(prompt, list) and all(isinstance(part, (str, list)) for part in prompt)
    if not is_parts or len(prompt) < 2:
        raise UnsupportedOptionError(
            "with choreo_auto a prompt is a list of two or more parts, each a text or a list of "
            "token ids",
            parameter="header",
            value=type(prompt).__name__,
        )
    online = serving.online_renderer
    most = online.model_config.max_model_len
    chars_per_token = online.renderer.get_tokenizer().max_chars_per_token
    # A part has one token at least, and a text a token for so many characters.
    least = sum(
        max(1, len(part) if isinstance(part, list) else -(-len(part) // chars_per_token))
        for part in prompt
    )
    if least > most:
        raise TooLongError(
            f"these parts have {least} tokens or more, and do not fit into a context of {most}; "
            "send less",
            parameter="header",
            value=f"{len(prompt)} parts",
        )
