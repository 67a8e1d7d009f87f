# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts on a server, with the methods of `PromptCache`: `ServerPrompts(client)`.

Schemas are the tenant's, and live until they are deleted; prompts run in the client's session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

from vllm_choreo.client import exchanges
from vllm_choreo.client.asynchronous import AsyncChoreoClient
from vllm_choreo.client.exchanges import Exchange, Request
from vllm_choreo.client.sync import ChoreoClient
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.answer import PromptAnswer
from vllm_choreo.pml.language.placing import PromptUsage
from vllm_choreo.pml.language.printer import to_markup
from vllm_choreo.pml.language.tree import Prompt, Schema
from vllm_choreo.pml.options import PromptOptions
from vllm_choreo.semantics.message import Message, Piece
from vllm_choreo.semantics.naming import message_id, message_ids
from vllm_choreo.wire.calls import adapter_name
from vllm_choreo.wire.sampling import sampling_fields

_T = TypeVar("_T")
_SCHEMAS = "/v1/choreo/schemas"
_PROMPTS = "/v1/choreo/prompts"
_PLAIN = ("layout", "mode", "repair", "save_as")
_OPTIONS = (*_PLAIN, "messages", "deny", "adapter", "sampling_params")


class ServerPrompts:
    """The schemas and prompts of a `ChoreoClient`."""

    def __init__(self, client: ChoreoClient) -> None:
        self._client = client

    def register(
        self, schema: str | Schema, *, context: str = "modules", encode: bool = False
    ) -> dict[str, Any]:
        """Add a schema, as `PromptCache.register` does; return the server's description of it."""
        return self._done(_registering(schema, context, encode))

    def schemas(self) -> list[dict[str, Any]]:
        """Descriptions of all schemas that prompts can name, the operator's too."""
        return self._done(_listing())

    def schema(self, name: str) -> dict[str, Any]:
        """Description of a schema: modules, `markup`, and its tree, `outline`."""
        return self._done(_reading(name))

    def show(self, name: str) -> str:
        """A schema as a tree, with tokens, positions, and what is encoded."""
        return str(self.schema(name)["outline"])

    def prefetch(self, name: str, module: str) -> int:
        """Bring the unions around a module into the KV cache, as `PromptCache.prefetch` does.

        They are those of the client's session, in which its prompts run.
        """
        return self._done(_prefetching(self._client.session, name, module))

    def unregister(self, name: str) -> None:
        """Delete a schema, and free its messages in all sessions of the tenant."""
        self._done(_deleting(name))

    def decode(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> PromptAnswer:
        """Answer one prompt, as `PromptCache.decode` does; `messages` are ids."""
        client = self._client
        return self._done(_running(client.session, prompt, options, client._denied))

    def _done(self, exchange: Exchange[_T]) -> _T:
        return self._client._exchange(exchange)


class AsyncServerPrompts:
    """The schemas and prompts of an `AsyncChoreoClient`."""

    def __init__(self, client: AsyncChoreoClient) -> None:
        self._client = client

    async def register(
        self, schema: str | Schema, *, context: str = "modules", encode: bool = False
    ) -> dict[str, Any]:
        """Add a schema: `ServerPrompts.register`."""
        return await self._done(_registering(schema, context, encode))

    async def schemas(self) -> list[dict[str, Any]]:
        """List the schemas: `ServerPrompts.schemas`."""
        return await self._done(_listing())

    async def schema(self, name: str) -> dict[str, Any]:
        """Describe a schema: `ServerPrompts.schema`."""
        return await self._done(_reading(name))

    async def show(self, name: str) -> str:
        """Show a schema as a tree: `ServerPrompts.show`."""
        return str((await self.schema(name))["outline"])

    async def prefetch(self, name: str, module: str) -> int:
        """Bring the unions around a module into the KV cache: `ServerPrompts.prefetch`."""
        return await self._done(_prefetching(await self._client.open(), name, module))

    async def unregister(self, name: str) -> None:
        """Delete a schema: `ServerPrompts.unregister`."""
        await self._done(_deleting(name))

    async def decode(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> PromptAnswer:
        """Answer one prompt: `ServerPrompts.decode`."""
        client = self._client
        session = await client.open()
        return await self._done(_running(session, prompt, options, client._denied))

    def stream_decode(
        self, prompt: str | Prompt, **options: Unpack[PromptOptions]
    ) -> AsyncIterator[Piece]:
        """Answer one prompt piece by piece; the last piece carries the message."""
        client = self._client

        def request(session: str) -> Request:
            body = _body(session, prompt, options, client._denied) | {"stream": True}
            return Request("POST", _PROMPTS, exchanges.json_of(body, "prompt"))

        return client._pieces(request)

    async def _done(self, exchange: Exchange[_T]) -> _T:
        return await self._client._exchange(exchange)


# -- what is asked ---------------------------------------------------------------------------------


def _registering(schema: str | Schema, context: str, encode: bool) -> Exchange[dict[str, Any]]:
    markup = to_markup(schema) if isinstance(schema, Schema) else schema
    body = {"markup": markup, "context": context, "encode": encode}
    request = Request("POST", _SCHEMAS, exchanges.json_of(body, "schema"))
    return Exchange(request, lambda answer, _: dict(answer))


def _listing() -> Exchange[list[dict[str, Any]]]:
    return Exchange(Request("GET", _SCHEMAS), lambda answer, _: list(answer["data"]))


def _reading(name: str) -> Exchange[dict[str, Any]]:
    return Exchange(Request("GET", _path(name)), lambda answer, _: dict(answer))


def _prefetching(session: str, name: str, module: str) -> Exchange[int]:
    body = {"module": module, "session": session}
    request = Request("POST", f"{_path(name)}/prefetch", exchanges.json_of(body, "module"))
    return Exchange(request, lambda answer, _: int(answer["encoded"]))


def _deleting(name: str) -> Exchange[None]:
    return Exchange(Request("DELETE", _path(name)), lambda answer, _: None)


def _path(name: str) -> str:
    # Names hold dots, and "." and ".." are steps in a path.
    return f"{_SCHEMAS}/{quote(str(name), safe='', errors='replace').replace('.', '%2E')}"


def _running(
    session: str, prompt: str | Prompt, options: Mapping[str, Any], denied: Sequence[str]
) -> Exchange[PromptAnswer]:
    body = _body(session, prompt, options, denied)
    request = Request("POST", _PROMPTS, exchanges.json_of(body, "prompt"))
    return Exchange(request, _answer_of)


def _body(
    session: str, prompt: str | Prompt, options: Mapping[str, Any], denied: Sequence[str]
) -> dict[str, Any]:
    """The JSON of a prompt.

    Raises:
        ChoreoError: an option that there is not, or that JSON cannot carry.
    """
    for name in options:
        if name not in _OPTIONS:
            raise PmlError("there is no such option of a prompt", parameter=name, value=name)
    messages = options.get("messages") or {}
    deny = (*denied, *message_ids(options.get("deny"), "deny"))
    body = {
        "prompt": to_markup(prompt) if isinstance(prompt, Prompt) else prompt,
        "session": session,
        **{name: options.get(name) for name in _PLAIN},
        "messages": {name: message_id(m, "messages") for name, m in messages.items()} or None,
        "deny": list(deny) or None,
        "adapter": adapter_name(options.get("adapter")),
        "sampling_params": sampling_fields(options.get("sampling_params")),
    }
    return {key: value for key, value in body.items() if value is not None}


def _answer_of(answer: Mapping[str, Any], submitted: float) -> PromptAnswer:
    message = exchanges.result_of(answer, submitted)
    assert isinstance(message, Message), "errors have a status of their own"
    counts = {field.name: answer["usage"][field.name] for field in fields(PromptUsage)}
    return PromptAnswer(message, PromptUsage(**counts))
