# SPDX-License-Identifier: Apache-2.0
"""`AutoClient`: the engine as seen by a request whose messages are found by what they hold."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.adapters import WithAdapter
from vllm_choreo.api.outcomes import Outcome
from vllm_choreo.chat.matching import Matching
from vllm_choreo.chat.parts import Split
from vllm_choreo.errors import (
    ChoreoError,
    ParentFailedError,
    TooLongError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.call import Tokenized
from vllm_choreo.server.auto_messages import ChatMessages, ReadChat
from vllm_choreo.server.openai.auto_options import AutoOptions
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.running import Run

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class AutoClient(CallClient):
    """The engine client of a chat whose messages are found or made.

    Args:
        llm, run: the same as for `CallClient`.
        messages: messages of the tenant's chats.
        options: the request's options.
        how: which messages may be read; the adapter's name comes with the prompt.
        split: cuts the prompt that vLLM has made of the request.
        count: counts how the chat was served, see `TenantChats.looked_up`.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        run: Run,
        messages: ChatMessages,
        options: AutoOptions,
        how: Matching,
        split: Callable[[EngineInput], Awaitable[Split]],
        count: Callable[[str, dict[str, int]], None],
    ) -> None:
        super().__init__(llm, run, {})
        self.is_asked = options.is_asked
        self._messages = messages
        self._options = options
        self._how = how
        self._split = split
        self._count = count
        self._chat: ReadChat | None = None
        self._as_text: AsyncGenerator[RequestOutput, None] | None = None
        self._prompt: EngineInput | None = None

    async def submit(self) -> bool:
        return self.is_text or await super().submit()

    async def _submit(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> None:
        reason = await self._read(prompt, sampling_params, options.get("lora_request"))
        self._count(reason or "messages", self._report())
        context = {"context": self._how.context} if self._options.mode == "choreo" else {}
        told = {"text": reason} if reason else {**context, **self._report()}
        told = {"mode": self._options.mode, **told}
        self.more_choreo = {"auto": told}
        if reason:
            self._as_text = self._llm.generate(prompt, sampling_params, request_id, **options)
            self.is_text = True
        else:
            await super()._submit(prompt, sampling_params, request_id, options)

    def _report(self) -> dict[str, int]:
        return self._chat.plan.report() if self._chat else {}

    async def _read(
        self, prompt: EngineInput, sampling_params: SamplingParams, lora: LoRARequest | None
    ) -> str:
        """Find or make the chat's messages; return why it is served as text, or ""."""
        options = self._options
        if reason := self._reason_for_text(prompt):
            if options.is_asked:
                raise UnsupportedOptionError(reason, parameter="header", value=prompt["type"])
            return "options"
        split = await self._split(prompt)
        if not split.parts:
            return split.reason or "template"
        self._prompt = prompt
        how = replace(self._how, adapter=lora.lora_name if lora else "")
        try:
            self._chat = await self._messages.read(
                split,
                prompt,
                options.mode,
                sampling_params.max_tokens,
                how,
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

    def _reason_for_text(self, prompt: EngineInput) -> str | None:
        """Reason why a prompt makes no messages; None: it does."""
        if prompt["type"] == "token":
            is_lost = self._messages.placeholder in prompt["prompt_token_ids"]
            return "the chat has placeholders of pictures without pictures" if is_lost else None
        if prompt["type"] != "multimodal":
            return "a message is made of text and pictures: leave the rest out"
        if self._messages.no_pictures:
            return f"{self._messages.no_pictures}; leave pictures out"
        return None if self.has_named_pictures else "pictures have names of their sender's"

    def _header_of(self, prompt: EngineInput) -> Sequence[int] | Tokenized:
        if prompt["type"] == "token" or self._chat is None:
            return super()._header_of(prompt)
        start = len(prompt["prompt_token_ids"]) - len(self._chat.plan.header)
        return self._run.part_of_prompt(prompt, start)

    def _adapter(self, named: LoRARequest | None) -> object:
        # As text, the whole chat is encoded by the adapter, wherever else it may be used.
        return WithAdapter(named) if self._options.mode == "choreo" else named

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        await self.submit()
        if self._as_text is not None:
            async for output in self._as_text:
                yield output
            return
        assert self._prompt is not None
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

    async def _cause_of(self, error: ChoreoError) -> ChoreoError:
        # Of a message that the client has not named, for it was made for the chat.
        is_of_parent = isinstance(error, (ParentFailedError, UnknownMessageError))
        cause = await self._chat.failure() if is_of_parent and self._chat else None
        return cause or error

    def leave(self) -> None:
        super().leave()
        if self._chat is not None:
            self._messages.leave(self._chat)
            if self.is_told and self.message is not None:
                self._messages.answered(self.message, self._chat)
