# SPDX-License-Identifier: Apache-2.0
"""Three ways to place calls over the same engines behind Ray Serve.

    two choices        Serve's own router; prompts are text, engines have vLLM's prefix caching
    prefix affinity    Ray's `PrefixCacheAffinityRouter`, which knows which prompts went where
    choreo             ours: messages, placed by what a call reads

Each is driven through a handle of Serve's from this process, without HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ray import serve
from ray.serve.config import DEFAULT_REQUEST_ROUTER_PATH, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from benchmarks.serve.workload import Session, Transcript, Turn
from vllm_choreo.cluster.client import ServeClient
from vllm_choreo.cluster.engine import EngineReplica, OutputBatch
from vllm_choreo.cluster.front import front_of
from vllm_choreo.cluster.router import PlacedRouter
from vllm_choreo.integrations.in_process import parse_options

# The class behind `ray.serve.llm.request_router`, whose package imports all of Ray's servers of
# LLMs, and what these need.
_PREFIX_AFFINITY = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ":PrefixCacheAffinityRouter"
)
_ROUTERS: Mapping[str, Any] = {
    "two choices": DEFAULT_REQUEST_ROUTER_PATH,
    "prefix affinity": _PREFIX_AFFINITY,
    "choreo": PlacedRouter,
}


# Engines of a machine that has much to do are late, and not to be replaced meanwhile.
_HEALTH_SECONDS = 600.0


@dataclass(frozen=True)
class Prompt:
    """A request as the routers of prompts read it.

    Attributes:
        prompt: its text, which here is the token ids in words.
        token_ids: the ids.
        num_tokens: tokens to generate.
    """

    prompt: str
    token_ids: tuple[int, ...]
    num_tokens: int


class TextReplica(EngineReplica):
    """An engine that serves prompts, whoever sends them."""

    async def generate(self, prompt: Prompt) -> AsyncIterator[OutputBatch]:
        """Generate as many tokens as the prompt asks for, greedily."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(temperature=0, max_tokens=prompt.num_tokens, ignore_eos=True)
        request = EngineCoreRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=list(prompt.token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        async for batch in self.run(self._info.replica, "benchmark", request):
            yield batch


@dataclass(frozen=True)
class Served:
    """A turn that was served.

    Attributes:
        ttft: seconds until its first token.
        num_prompt: tokens of all that it reads, and of its header.
        generated: what it generated.
    """

    ttft: float
    num_prompt: int
    generated: tuple[int, ...]


class Policy(Protocol):
    """A way to serve sessions."""

    @property
    def num_encoded(self) -> int:
        """Prompt tokens that engines have encoded, on whatever engine and how often ever."""

    async def serve(self, session: Session) -> list[Served]:
        """Serve the turns of a session, one after the other."""


class Text:
    """Prompts that are text, over vLLM's prefix caching."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._generate = handle.options(stream=True).generate
        self.num_encoded = 0

    async def serve(self, session: Session) -> list[Served]:
        transcript, served = Transcript(), []
        for turn in session.turns:
            found = await self._serve(transcript.prompt(turn), turn.num_tokens)
            transcript.answer(turn, found.generated)
            served.append(found)
        return served

    async def _serve(self, token_ids: tuple[int, ...], num_tokens: int) -> Served:
        words = " ".join(map(str, token_ids))
        start, ttft, generated = time.perf_counter(), 0.0, list[int]()
        async for batch in self._generate.remote(Prompt(words, token_ids, num_tokens)):
            for output in batch.outputs:
                self.num_encoded += _encoded(output)
                ttft = ttft or time.perf_counter() - start
                generated += output.new_token_ids
        return Served(ttft, len(token_ids), tuple(generated))


class CountingClient(ServeClient):
    """Client that counts the tokens that its engines encode, for messages made again, too."""

    num_encoded = 0

    def _on_output(self, output: Any) -> None:
        self.num_encoded += _encoded(output)
        super()._on_output(output)


def _encoded(output: Any) -> int:
    stats = output.prefill_stats
    return 0 if stats is None else int(stats.num_computed_tokens)


class Choreo:
    """Messages, placed by what a call reads."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def num_encoded(self) -> int:
        return int(self._llm.engine_core.num_encoded)

    async def serve(self, session: Session) -> list[Served]:
        from vllm_choreo import AsyncChoreography

        async with AsyncChoreography(self._llm, tenant="benchmark") as c:
            lengths: dict[str, int] = {}
            return [await self._serve(c, turn, lengths) for turn in session.turns]

    async def _serve(self, c: Any, turn: Turn, lengths: dict[str, int]) -> Served:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=turn.num_tokens, ignore_eos=True)
        start, ttft = time.perf_counter(), 0.0
        await c.submit_all(
            [{"tokens": list(ids), "save_as": name} for name, ids in turn.given.items()]
        )
        stream = c.stream_decode(
            list(turn.header), parents=list(turn.reads), save_as=turn.name, sampling_params=params
        )
        async for piece in stream:
            ttft = ttft or time.perf_counter() - start
            message = piece.message or None
        assert message is not None
        lengths.update({name: len(ids) for name, ids in turn.given.items()})
        lengths[turn.name] = message.num_tokens
        num_prompt = sum(lengths[name] for name in turn.reads) + len(turn.header)
        return Served(ttft, num_prompt, message.generated_token_ids)


@asynccontextmanager
async def started(
    name: str, model: str, num_engines: int, options: dict[str, Any]
) -> AsyncIterator[Policy]:
    """Start engines behind Serve, and what places calls over them; `name` is the policy's."""
    engines = serve.deployment(TextReplica).options(
        name="engine",
        num_replicas=num_engines,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0.1},
        health_check_timeout_s=_HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTERS[name]),
    )
    run = partial(serve.run, engines.bind(model, options), name="benchmark", route_prefix=None)
    handle = await asyncio.to_thread(run)
    if name != "choreo":
        yield Text(handle)
        return
    args = parse_options(model, {**options, "data_parallel_size": num_engines})
    async with front_of(handle, args, "benchmark", CountingClient) as llm:
        yield Choreo(llm)
