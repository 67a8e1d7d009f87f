# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` without the plugin as a worker: text over its prefix caching, by OpenAI's client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import AsyncOpenAI

from vllm_choreo.planner.workers.worker import Answer
from vllm_choreo.testing.server import Server, start_server

_KEY = "rival"
_OF_VLLM = ("ignore_eos",)  # what OpenAI's client has no argument for


class Completions:
    """Answers calls that are text alone, with no tokens that the prompt does not say.

    Args:
        client: of the server.
        model: the name under which it serves its model.
    """

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client, self._model = client, model

    async def decode(
        self, header: str, parents: Sequence[Any], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer:
        """An answer to a prompt. Raises openai.APIError: the server refuses it."""
        given = {name: value for name, value in sampling.items() if name not in _OF_VLLM}
        extra = {name: value for name, value in sampling.items() if name in _OF_VLLM}
        extra["add_special_tokens"] = False
        found = await self._client.completions.create(
            model=self._model, prompt=header, extra_body=extra, **given
        )
        usage = found.usage
        assert usage is not None, "vLLM always tells"
        details = usage.prompt_tokens_details
        return Answer(
            text=found.choices[0].text,
            num_out=usage.completion_tokens,
            num_prompt=usage.prompt_tokens,
            reused=(details.cached_tokens or 0) if details else 0,
        )


@asynccontextmanager
async def completions(server: Server) -> AsyncIterator[Completions]:
    """A client, with an empty prefix cache on the server."""
    async with AsyncOpenAI(
        base_url=f"{server.base_url}/v1", api_key=_KEY, timeout=1200.0, max_retries=0
    ) as client:
        await client.post("../reset_prefix_cache", cast_to=object)
        yield Completions(client, server.model)


@contextmanager
def stock_server(model: Path, **options: Any) -> Iterator[Server]:
    """`vllm serve` on all cores, of which nothing is the plugin's.

    Args:
        model: its folder.
        options: of the command.
    """
    env = {
        "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "VLLM_SERVER_DEV_MODE": "1",  # has the route that empties the prefix cache
    }
    without = {"plugin": None, "enable_auto_tool_choice": None, "tool_call_parser": None}
    with (
        TemporaryDirectory() as folder,
        start_server(model, Path(folder), keys=[_KEY], env=env, **without, **options) as server,
    ):
        yield server
