# SPDX-License-Identifier: Apache-2.0
"""Guard of the engine: our own code hands it choreographed requests, and no other route may.

Most of vLLM's routes pass `vllm_xargs`, or whole sampling parameters, on to the engine as a client
wrote them. There a client could name the session of another tenant, or name messages and be served
without them. So all of them are refused, at the one place through which every request goes; and
before that on the one route that would begin an answer first. There, too, every ordinary request is
told apart by its tenant: vLLM's prefix cache would tell one of them, by time and by
`cached_tokens`, what another has sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_choreo.api.pending import OutputQueue
from vllm_choreo.semantics.params import EXTRA_ARGS_KEY, FLAT_PREFIX
from vllm_choreo.server.tenants import cache_salt

if TYPE_CHECKING:
    from starlette.requests import Request
    from vllm import PoolingParams, RequestOutput, SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.inputs import PromptType
    from vllm.inputs.engine import EngineInput

# All forms in which vLLM takes a prompt.
Prompt: TypeAlias = (
    "EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None]"
)


def guarded(llm: AsyncLLM, responses: OpenAIServingResponses) -> AsyncLLM:
    """Let `llm`, and the handler of /v1/responses, refuse choreographed requests from now on.

    Returns:
        `llm` as it was, for those who may.
    """
    # vLLM names both classes; the subclasses only add checks.
    llm.__class__ = _GuardedLLM
    responses.__class__ = _GuardedResponses
    return _Unguarded(llm)


def choreo_keys(extra_args: Iterable[str] | None) -> list[str]:
    """Names of extra arguments that are meant for us."""
    return [key for key in extra_args or () if key == EXTRA_ARGS_KEY or key.startswith(FLAT_PREFIX)]


def _refuse(extra_args: Iterable[str] | None) -> None:
    """Check that a request is not choreographed.

    Raises:
        VLLMValidationError: the request is choreographed.
    """
    for key in choreo_keys(extra_args):
        raise VLLMValidationError(
            "This route does not choreograph; call /v1/completions, /v1/chat/completions or "
            "/v1/choreo.",
            parameter=f"vllm_xargs.{key}",
        )


def _check_transfers(extra_args: Mapping[str, Any] | None) -> None:
    """Check that the parameters of connectors are objects.

    Raises:
        VLLMValidationError: what vLLM takes for an object is none, and would end in an error of
            the server.
    """
    for key in ("kv_transfer_params", "ec_transfer_params"):
        value = (extra_args or {}).get(key)
        if value is not None and not isinstance(value, dict):
            raise VLLMValidationError(
                "This argument is an object of a connector's parameters.",
                parameter=f"vllm_xargs.{key}",
                value=type(value).__name__,  # it may be as long as a body
            )


def _salted(prompt: Prompt) -> Prompt:
    """A prompt, of any form that vLLM takes, with the salt of the tenant that sends it."""
    if isinstance(prompt, AsyncGenerator):
        return _salted_parts(prompt)
    if isinstance(prompt, EngineCoreRequest):
        prompt.cache_salt = cache_salt(prompt.cache_salt)
        return prompt
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    salt = cache_salt(prompt.get("cache_salt"))
    return prompt if salt is None else {**prompt, "cache_salt": salt}


async def _salted_parts(
    prompts: AsyncGenerator[StreamingInput, None],
) -> AsyncGenerator[StreamingInput, None]:
    async for part in prompts:
        yield replace(part, prompt=_salted(part.prompt))


class _GuardedLLM(AsyncLLM):
    """vLLM's engine client, which checks what every route hands to it."""

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, *args: object, **kwargs: object
    ) -> AsyncGenerator[RequestOutput, None]:
        # At once, and not when the first output is asked for: streams have begun by then.
        _refuse(sampling_params.extra_args)
        _check_transfers(sampling_params.extra_args)
        return super().generate(prompt, sampling_params, *args, **kwargs)

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *args: object,
        **kwargs: object,
    ) -> OutputQueue:
        extra_args = getattr(params, "extra_args", None)
        _refuse(extra_args)
        _check_transfers(extra_args)
        return await super().add_request(request_id, _salted(prompt), params, *args, **kwargs)


class _GuardedResponses(OpenAIServingResponses):
    """vLLM's handler of /v1/responses, which asks the engine when its stream has begun."""

    async def create_responses(
        self, request: ResponsesRequest, raw_request: Request | None = None
    ) -> object:
        _refuse(request.vllm_xargs)
        return await super().create_responses(request, raw_request)


class _Unguarded:
    """An engine client whose `add_request` lets choreographed requests through."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *args: object,
        **kwargs: object,
    ) -> OutputQueue:
        _check_transfers(params.extra_args)
        return await AsyncLLM.add_request(self._llm, request_id, prompt, params, *args, **kwargs)
