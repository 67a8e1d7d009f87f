# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's own routes from the OpenAI client, and what their answers say."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from vllm_choreo.testing.server import Server


class Caller:
    """Calls one of the two routes of a session, and reads either form of its answers."""

    def __init__(self, server: Server, session: str | None, key: str | None = None) -> None:
        key = key or server.keys[0]
        self.client = OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)
        self.session = session
        self.model = server.model

    def body(
        self, route: str, prompt: Any, keys: dict[str, Any], options: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the client's method takes; answers have as many tokens as they may."""
        xargs = {f"choreo_{name}": value for name, value in keys.items()}
        if self.session is not None:
            xargs.setdefault("choreo_session", self.session)
        options = dict(options or {})
        ignored = options.pop("ignore_eos", True)
        extra = {"return_token_ids": True, "ignore_eos": ignored, "vllm_xargs": xargs}
        content = (
            {"messages": [{"role": "user", "content": prompt}]}
            if route == "chat"
            else {"prompt": prompt}
        )
        common = {"model": self.model, "temperature": 0, "max_tokens": 6, "extra_body": extra}
        return {**common, **content, **options}

    def __call__(
        self, route: str, prompt: Any, *, options: dict[str, Any] | None = None, **keys: Any
    ) -> dict[str, Any]:
        """One call: its answer, streams put together."""
        body = self.body(route, prompt, keys, options)
        create = (self.client.chat if route == "chat" else self.client).completions.create
        if not body.get("stream"):
            return create(**body).model_dump()
        body["stream_options"] = {"include_usage": True}
        return merge_chunks([chunk.model_dump() for chunk in create(**body)])


def merge_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream amounts to."""
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"]
    assert all(not chunk["usage"] for chunk in parts)
    with_id = [chunk for chunk in parts if "choreo" in chunk]
    # Of the parts, only the one that ends the choice can know.
    assert [chunk["choices"][0]["finish_reason"] for chunk in with_id] == ["length"]
    assert with_id[0]["choreo"] == last["choreo"]
    choices = [chunk["choices"][0] for chunk in parts]
    text = "".join(c["text"] if "text" in c else c["delta"]["content"] or "" for c in choices)
    first = parts[0] if parts[0].get("prompt_token_ids") else choices[0]
    choice = {
        "text": text,
        "token_ids": [token for c in choices for token in c.get("token_ids") or ()],
        "prompt_token_ids": first["prompt_token_ids"],
    }
    return {**last, "choices": [choice]}


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def tokens_of(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of the answer."""
    (choice,) = answer["choices"]
    prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
    return prompt, choice["token_ids"]


def plain(server: Server, prompt: Any, num_tokens: int = 6, **options: Any) -> dict[str, Any]:
    """An ordinary completion."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "add_special_tokens": False,
        **options,
    }
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result
