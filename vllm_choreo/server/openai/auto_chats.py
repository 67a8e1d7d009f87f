# SPDX-License-Identifier: Apache-2.0
"""`choreo_auto`: requests to /v1/chat/completions whose messages are found by what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_choreo.api.adapters import Placed
from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.auto.cutter import Cutter, end_tokens
from vllm_choreo.auto.marks import marked
from vllm_choreo.auto.matching import check_auto
from vllm_choreo.auto.parts import Split
from vllm_choreo.errors import ChoreoError, TooLongError, UnsupportedOptionError
from vllm_choreo.repair.rules import rule_given
from vllm_choreo.server.auto_messages import ChatMessages, ReadChat, TenantChats
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.openai.reading import check_form
from vllm_choreo.server.running import Run
from vllm_choreo.server.strict_json import read_json
from vllm_choreo.server.tenants import tenant_of

AUTO_KEY, MIN_TOKENS_KEY, REPAIR_KEY = "choreo_auto", "choreo_auto_min_tokens", "choreo_repair"
AUTO_KEYS = (AUTO_KEY, MIN_TOKENS_KEY, REPAIR_KEY)
# For clients that cannot send `vllm_xargs`.
AUTO_HEADER = "X-Choreo-Auto"


@dataclass(frozen=True)
class AutoOptions:
    """What a request says of its messages.

    Attributes:
        mode: "exact", "choreo" or "off".
        is_asked: it says so itself: what cannot be done is refused then. Where only the server's
            default says so, it is served as text.
        min_tokens: shorter parts are joined; None: as the server has it.
        repair: of the call that generates, in mode "choreo".
    """

    mode: str
    is_asked: bool = False
    min_tokens: int | None = None
    repair: Any = None


class AutoChats:
    """Chats that name no messages, on one server.

    Args:
        chats: the messages of its tenants.
        llm: an engine client that takes choreographed requests.
        default: the mode of requests that say none.
    """

    def __init__(self, chats: TenantChats, llm: Any, default: str) -> None:
        self._chats = chats
        self._llm = llm
        self._default = default
        self._cutter: Cutter | None = None

    async def client(self, serving: Any, body: Any, request: Request | None) -> CallClient | None:
        """The engine client of a chat whose messages are to be found; None: of another one.

        Args:
            serving: the handler of the request.
            body, request: what was sent. Its keys for us are taken out of `body`.

        Raises:
            ChoreoError: the request asks for what cannot be.
        """
        if request is None:
            return None
        options = read_options(body.vllm_xargs, request.headers.get(AUTO_HEADER), self._default)
        if options is None:
            return None
        if options.is_asked:
            read_json(await request.body())  # of equal keys, parsers differ in which one counts
        others = {k: v for k, v in (body.vllm_xargs or {}).items() if k not in AUTO_KEYS}
        body.vllm_xargs = others or None
        if options.mode == "off":
            return None
        try:
            check_form(body)
            tenant = tenant_of(request)
            messages = self._chats.of(tenant)
        except ChoreoError as error:
            if options.is_asked:
                raise
            is_form = isinstance(error, UnsupportedOptionError)
            self._chats.looked_up("options" if is_form else "limit", {})
            return None
        split = partial(self._split, serving, body, options.min_tokens)
        run = Run(messages.sessions, messages.session)
        return AutoClient(self._llm, run, messages, options, split, self._chats.looked_up)

    async def _split(self, serving: Any, body: Any, min_tokens: int | None, prompt: Any) -> Split:
        """The parts of a chat as vLLM has rendered it: it is rendered once more, with marks."""
        online, token_ids = serving.online_renderer, prompt["prompt_token_ids"]
        messages, contents = marked(body.messages)
        copy = body.model_copy(update={"messages": messages, "kv_transfer_params": None})
        try:
            rendered = await online.render_chat(copy)
        except ValueError:  # a template that wants its contents to be of some form
            return Split(tuple(token_ids), reason="template")
        if isinstance(rendered, ErrorResponse):
            return Split(tuple(token_ids), reason="template")
        _, (marks,) = rendered
        text = marks.get("prompt") or marks["prompt_token_ids"]
        split = self._cutter_of(online).split
        # In a thread: of a long chat it takes a while, in which others are to be served.
        return await asyncio.to_thread(
            split, token_ids, prompt.get("prompt"), text, contents, min_tokens
        )

    def _cutter_of(self, online: Any) -> Cutter:
        if self._cutter is None:
            tokenizer = online.renderer.get_tokenizer()
            ends = end_tokens(tokenizer, online.model_config.try_get_generation_config())
            self._cutter = Cutter(tokenizer, ends, self._chats.min_tokens)
        return self._cutter


class AutoClient(CallClient):
    """The engine client of a chat whose messages are found or made.

    Args:
        llm, run: as of `CallClient`.
        messages: of the tenant.
        options: of the request.
        split: cuts the prompt that vLLM has made of it.
        count: is told what became of it: see `TenantChats.looked_up`.
    """

    def __init__(
        self,
        llm: Any,
        run: Run,
        messages: ChatMessages,
        options: AutoOptions,
        split: Callable[[Any], Awaitable[Split]],
        count: Callable[[str, dict[str, int]], None],
    ) -> None:
        super().__init__(llm, run, {})
        self._messages = messages
        self._options = options
        self._split = split
        self._count = count
        self._chat: ReadChat | None = None
        self._as_text: AsyncGenerator[Any, None] | None = None
        self._prompt: Any = None
        self._adapter_name = ""

    async def submit(self) -> bool:
        return self.is_text or await super().submit()

    async def _submit(
        self, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any]
    ) -> None:
        reason = await self._read(prompt, sampling_params, options.get("lora_request"))
        self._count(reason or "messages", self._report())
        told = {"mode": self._options.mode, **({"text": reason} if reason else self._report())}
        self.more_choreo = {"auto": told}
        if reason:
            self._as_text = self._llm.generate(prompt, sampling_params, request_id, **options)
            self.is_text = True
        else:
            await super()._submit(prompt, sampling_params, request_id, options)

    def _report(self) -> dict[str, int]:
        return self._chat.plan.report() if self._chat else {}

    async def _read(self, prompt: Any, sampling_params: Any, lora: Any) -> str:
        """Find or make the chat's messages; why it is served as text, or ""."""
        options = self._options
        if prompt["type"] != "token":
            if options.is_asked:
                raise UnsupportedOptionError(
                    "a message is made of text: leave pictures and sound out",
                    parameter="header",
                    value=prompt["type"],
                )
            return "options"
        split = await self._split(prompt)
        if not split.parts:
            return split.reason or "template"
        self._prompt, self._adapter_name = prompt, lora.lora_name if lora else ""
        try:
            self._chat = await self._messages.read(
                split,
                options.mode,
                sampling_params.max_tokens,
                self._adapter_name,
                self._adapter(lora),
            )
        except TooLongError:
            return "context"
        except ChoreoError:
            if options.is_asked:
                raise
            return "limit"
        self._header = self._chat.plan.header
        self._arguments = {"parents": self._chat.parents, "mode": options.mode}
        if options.repair is not None:
            self._arguments["repair"] = options.repair
        return ""

    def _adapter(self, named: Any) -> Any:
        # As text, the whole chat is encoded by the adapter, wherever else it may be worn.
        return Placed(named) if self._options.mode == "choreo" else named

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        await self.submit()
        if self._as_text is not None:
            async for output in self._as_text:
                yield output
            return
        async for output in super()._outputs():
            output.prompt_token_ids = self._prompt["prompt_token_ids"]
            yield output

    async def _conclude(self, outcome: Outcome) -> None:
        await super()._conclude(outcome)
        assert self._chat is not None and self.message is not None
        # What was encoded for this request is none that it found.
        encoded, usage = await self._chat.num_encoded(), self.message.usage
        reused = usage.reused_tokens - encoded
        self.more_usage = {
            "reused_tokens": reused,
            "encoded_tokens": usage.encoded_tokens + encoded,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def leave(self) -> None:
        super().leave()
        if self._chat is not None:
            self._messages.leave(self._chat)
            if self.is_told and self.message is not None:
                self._messages.answered(self.message, self._adapter_name)


def read_options(
    xargs: dict[str, Any] | None, header: str | None, default: str
) -> AutoOptions | None:
    """What a request says of its messages; None: it names them, or they are not to be found.

    Args:
        xargs: its `vllm_xargs`.
        header: the value of its header `AUTO_HEADER`.
        default: the server's.

    Raises:
        ChoreoError: a key without its form, or beside which there is no `choreo_auto`.
    """
    keys = choreo_keys(xargs)
    if AUTO_KEY not in keys:
        if keys:
            return None  # it names its messages itself, whatever the default is
        if header is not None:
            return AutoOptions(check_auto(header, AUTO_HEADER), is_asked=True)
        return AutoOptions(default) if default != "off" else None
    assert xargs is not None
    mode = check_auto(xargs[AUTO_KEY], "auto")
    for key in keys:
        if key not in AUTO_KEYS:
            raise UnsupportedOptionError(
                "with choreo_auto the messages of the chat are found by what they hold: leave "
                "this out, or leave choreo_auto out",
                parameter=f"vllm_xargs.{key}",
                value=xargs[key],
            )
    repair = xargs.get(REPAIR_KEY)
    if repair is not None and mode != "choreo":
        raise UnsupportedOptionError('repair is of mode "choreo"', parameter="repair", value=repair)
    return AutoOptions(
        mode,
        is_asked=True,
        min_tokens=_min_tokens(xargs.get(MIN_TOKENS_KEY)),
        repair=rule_given(repair) if isinstance(repair, str) else repair,
    )


def _min_tokens(given: Any) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise ChoreoError("an int > 0 is needed", parameter="auto_min_tokens", value=given)
    return given
