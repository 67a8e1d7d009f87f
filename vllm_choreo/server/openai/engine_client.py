# SPDX-License-Identifier: Apache-2.0
"""`CallClient`: the engine as one choreographed request sees it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.adapters import WithAdapter
from vllm_choreo.api.outcomes import Outcome, engine_prompt, metrics_of
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.errors import ChoreoError, PrefixError, UnsupportedOptionError
from vllm_choreo.semantics.call import Tokenized
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.pictures import IMAGE
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.running import Run

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class CallClient:
    """The engine client of one request: vLLM's own, but `generate` makes a message.

    Args:
        llm: an engine client that takes choreographed requests.
        run: calls of the request; ends with `leave`.
        arguments: arguments of `AsyncChoreography.decode`; and `prefix`, token ids with which the
            request's text is to begin, and which are no part of the header.
        header: token ids in place of those that vLLM makes of the request's text; None: use those.
        more_usage: numbers of the answer's usage beside the message's, or in their place.

    Attributes:
        message: the message that the request made, once it is complete.
        error: why it made none.
        is_told: True if the client was sent the message; one that it was not told of is freed.
        more_choreo: fields of the answer's `choreo` beside the message's id.
        is_text: vLLM serves the request as it is, and no message is made.
        is_asked, has_named_pictures: see `PictureReader`.
        on_submitted: called when the engine has the call; from then on others may name it.
        settled: set when the engine has the call, or will never have it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        run: Run,
        arguments: dict[str, Any],
        header: Sequence[int] | None = None,
        more_usage: Mapping[str, Any] | None = None,
    ) -> None:
        self.message: Message | None = None
        self.error: ChoreoError | None = None
        self.is_told = self.is_text = self.has_named_pictures = False
        self.is_asked = True
        self.on_submitted: Callable[[], None] = lambda: None
        self.settled = asyncio.Event()
        self._llm = llm
        self._run = run
        self._arguments = dict(arguments)
        self._prefix: list[int] = self._arguments.pop("prefix", [])
        self._header = header
        self.more_usage: Mapping[str, Any] = more_usage or {}
        self.more_choreo: dict[str, Any] = {}
        self._start: Callable[[], Awaitable[None]] | None = None
        self._pending: Pending | None = None
        self._queue: OutputQueue | None = None
        self._submitted = 0.0

    @property
    def tenant(self) -> str:
        """Tenant whose request it is."""
        return self._run.tenant

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        **options: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Replace `AsyncLLM.generate`: the prompt is the header of a decode."""
        assert self._start is None, "requests of several prompts are refused"
        self._start = lambda: self._submit(prompt, sampling_params, request_id, options)
        return self._outputs()

    async def submit(self) -> bool:
        """Hand the request to the engine if vLLM has asked for it; False: vLLM has refused it."""
        if self._start is None:
            return False
        if self._pending is None:
            await self._start()
        return True

    async def _submit(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> None:
        header = self._header_of(prompt)
        if isinstance(header, Tokenized):
            prompt = header.prompt or engine_prompt(header.token_ids)
        elif header is not prompt["prompt_token_ids"]:
            prompt = engine_prompt(header)
        params = sampling_params.clone()
        keys = choreo_keys(params.extra_args)
        given = params.extra_args or {}
        params.extra_args = {k: v for k, v in given.items() if k not in keys} or None
        self._submitted = time.perf_counter()
        parents = self._arguments.get("parents")
        if isinstance(parents, (list, tuple)):  # what else it is, the call refuses
            await self._run.fetch(span.id for span in parents if isinstance(span, ParentSpan))
        adapter = self._adapter(options.get("lora_request"))
        pending = self._run.begin(
            header, sampling_params=params, adapter=adapter, **self._arguments
        )
        options["lora_request"] = pending.call.adapter
        self._pending, params = pending, pending.call.params.apply(params)
        # With one engine nothing else runs from here on until that has the request: who names the
        # message as a parent comes later. With several, who does waits until it is complete.
        if (engine := await self._run.place(pending)) is not None:
            options["data_parallel_rank"] = engine
        self._queue = await self._llm.add_request(request_id, prompt, params, **options)
        await self._run.submitted(pending, self._queue)
        self.settled.set()
        self.on_submitted()

    def _header_of(self, prompt: EngineInput) -> Sequence[int] | Tokenized:
        """The new tokens of a request: its whole prompt, or what follows the prefix.

        Raises:
            PrefixError: the prompt does not begin with the prefix, or that has pictures.
            UnsupportedOptionError: there is something else in it than tokens and pictures.
        """
        if prompt["type"] not in ("token", "multimodal"):
            raise UnsupportedOptionError(
                "a message is made of text and pictures: leave the rest out",
                parameter="header",
                value=prompt["type"],
            )
        if prompt["type"] == "token":
            header = prompt["prompt_token_ids"] if self._header is None else self._header
            return _behind(self._prefix, header) if self._prefix else header
        if self._header is not None:
            raise UnsupportedOptionError(
                "a prompt of a schema has no pictures: leave them out",
                parameter="header",
                value="pictures",
            )
        first = min(place.offset for place in prompt["mm_placeholders"][IMAGE])
        if first < len(self._prefix):
            raise PrefixError(
                "tokens do not tell which picture they stand for: let the prefix end before the "
                f"first one, at token {first}, or leave the prefix out",
                parameter="prefix",
                value=f"{len(self._prefix)} tokens",
            )
        _behind(self._prefix, prompt["prompt_token_ids"])
        return self._run.part_of_prompt(prompt, len(self._prefix))

    def _adapter(self, named: LoRARequest | None) -> object:
        """Adapter of the call: `model` names that of a whole workflow, of which it is a part."""
        return WithAdapter(named)

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield vLLM's outputs; the last one when the message is complete."""
        await self.submit()
        assert self._queue is not None
        whole, first = None, None
        while True:
            output = self._queue.get_nowait() or await self._queue.get()
            now = time.perf_counter()
            first = now if first is None else first
            if whole is None:
                whole = output if output.finished else copy.deepcopy(output)
            else:
                whole.add(output, aggregate=True)
            if output.finished:
                metrics = metrics_of(output, self._submitted, _first_token(output, first), now)
                await self._conclude(Outcome(whole, metrics))
                output.kv_transfer_params = None  # our report, not vLLM's
                yield output
                return
            yield output

    async def _conclude(self, outcome: Outcome) -> None:
        assert self._pending is not None
        result = await self._run.conclude(self._pending, outcome)
        if isinstance(result, ChoreoError):
            self.error = await self._cause_of(result)
            raise self.error
        self.message = result

    async def _cause_of(self, error: ChoreoError) -> ChoreoError:
        """Error that made the call fail with `error`, as the client is told."""
        return error

    def refused(self, error: ChoreoError) -> None:
        """Count an error with which the client is answered inside a stream."""
        self._run.refused(error)

    def leave(self) -> None:
        """End the request: end its call, and free a message that the client was not told of."""
        self.settled.set()
        self._run.leave(is_answered=self.is_told)


def _behind(prefix: list[int], token_ids: Sequence[int]) -> Sequence[int]:
    """Token ids that follow the prefix.

    Raises:
        PrefixError: `token_ids` begin otherwise.
    """
    if list(token_ids[: len(prefix)]) != prefix:
        raise PrefixError(
            "the request's text does not begin with these tokens, so the parents do not stand for "
            "its beginning: render the text again, or leave the prefix out",
            parameter="prefix",
            value=f"{len(prefix)} tokens",
        )
    return token_ids[len(prefix) :]


def _first_token(output: RequestOutput, seen: float) -> float:
    """Time of the first token. Without a stream, all are seen at once: vLLM tells when."""
    told = output.metrics.first_token_ts if output.metrics is not None else 0.0
    return min(seen, told or seen)
