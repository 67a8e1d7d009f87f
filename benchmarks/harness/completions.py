# SPDX-License-Identifier: Apache-2.0
"""A client of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


def greedy(num_tokens: int, **options: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **options}


async def stream_completion(
    http: httpx.AsyncClient, model: str, prompt: list[int], num_tokens: int, **body: Any
) -> AsyncIterator[list[int]]:
    """The token ids of a greedy completion, as they come."""
    request = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "return_token_ids": True,
        **greedy(num_tokens),
        **body,
    }
    async with http.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode()[:300])
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(str(data["error"])[:300])
            for choice in data["choices"]:
                yield choice.get("token_ids") or []
