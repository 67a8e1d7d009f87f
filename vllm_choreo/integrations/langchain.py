# SPDX-License-Identifier: Apache-2.0
"""`ChatChoreo`: LangChain's chat model over a server with the plugin.

    from vllm_choreo.integrations.langchain import ChatChoreo

    llm = ChatChoreo(base_url="http://localhost:8000/v1", api_key="secret", model="MODEL")
    answer = llm.invoke([("system", "Answer briefly."), ("user", document), ("user", question)])
    print(answer.content, answer.response_metadata["choreo"])

All that `ChatOpenAI` does, it does: streams, tools, structured output, batches, callbacks. Beneath,
each message is a message of a session, encoded once and read by every later call that has it, in
any place. Needs `pip install "vllm-choreo[langchain]"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, model_validator

from vllm_choreo.errors import ChoreoError
from vllm_choreo.integrations.conversations import ID_KEY, Conversations
from vllm_choreo.integrations.openai_http import ChoreoAsyncHttpClient, ChoreoHttpClient

_NUMBERS = ("exact", "reused_tokens", "repositioned_tokens", "encoded_tokens", "repaired_tokens")
_CLIENTS = {"http_client": ChoreoHttpClient, "http_async_client": ChoreoAsyncHttpClient}


class ChatChoreo(ChatOpenAI):
    """A `ChatOpenAI` whose chats share what they have in common, whatever the order.

    The id of an answer is that of its message on the server; `response_metadata["choreo"]` has it
    too, and what the call reused. An answer that comes back in a history is found by its id, and
    read as it was generated, if it still says the same.

    Args:
        mode: "choreo": messages are encoded for themselves; "exact": answers are those of plain
            text; "off": requests are plain, and vLLM's prefix caching does what it can.
        conversations: conversations of another instance, to share its messages, and its mode.
        server: an `InProcessServer`, in place of `base_url`, `api_key` and `model`.
        http_client, http_async_client: a `ChoreoHttpClient` and a `ChoreoAsyncHttpClient` of your
            own, say with a proxy; they bring their conversations with them.

    All others are those of `ChatOpenAI`. Requests that name parents themselves, in
    `extra_body={"vllm_xargs": {"choreo_…": …}}`, are sent as they are.

    Raises:
        ValueError: no such mode, or clients that do not choreograph.
    """

    mode: Literal["choreo", "exact", "off"] = "choreo"
    conversations: Any = Field(default=None, exclude=True)
    server: Any = Field(default=None, exclude=True)
    stream_usage: bool | None = True
    use_responses_api: bool | None = False  # vLLM's route for it does not choreograph

    @model_validator(mode="before")
    @classmethod
    def _choreographed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put our clients beneath the SDK."""
        given = {name: values[name] for name in _CLIENTS if values.get(name) is not None}
        for name, client in given.items():
            if not isinstance(client, _CLIENTS[name]):
                raise ChoreoError(
                    f"give a {_CLIENTS[name].__name__}, which takes the same arguments, or take "
                    "ChatOpenAI, which does not choreograph",
                    parameter=name,
                    value=type(client).__name__,
                )
        shared = values.get("conversations")
        shared = shared or next((client.conversations for client in given.values()), None)
        shared = shared or Conversations(values.get("mode", "choreo"))
        values = {**values, "conversations": shared, "mode": shared.mode}
        if (server := values.get("server")) is not None:
            of_server = {"base_url": server.base_url, "api_key": server.api_key}
            values = {"model": server.model, **values, **of_server}
        new = {
            name: kind(shared) if server is None else getattr(server, name)(shared)
            for name, kind in _CLIENTS.items()
            if name not in given
        }
        return {**values, **new}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False: a session cannot be written down."""
        return False

    @property
    def _llm_type(self) -> str:
        return "choreo-chat"

    def end_session(self) -> None:
        """Free all messages on the server; the next call opens another session."""
        self.http_client.end_session()

    async def aend_session(self) -> None:
        """Free all messages on the server, asynchronously; see `end_session`."""
        await self.http_async_client.end_session()

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: object = None,
        strict: bool | None = None,
        **kwargs: object,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Extend `ChatOpenAI.bind_tools`: tools are strict unless you say False.

        The server then holds arguments to their schema; else to JSON alone, which small models
        fill as they like.
        """
        strict = strict is not False
        return super().bind_tools(tools, tool_choice=tool_choice, strict=strict, **kwargs)

    # -- what is added to ChatOpenAI's messages --------------------------------------------------

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: object
    ) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if self.mode != "off":
            messages = self._convert_input(input_).to_messages()
            for message, sent in zip(messages, payload["messages"], strict=True):
                if isinstance(message, AIMessage) and "choreo" in message.response_metadata:
                    sent[ID_KEY] = message.id
        return payload

    def _create_chat_result(
        self, response: dict[str, Any] | BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        told = response if isinstance(response, dict) else response.model_dump(warnings=False)
        if "choreo" in told:
            _name(result.generations[0].message, told)
            _number(result.generations[0].message, told)
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        if made is not None and "choreo" in chunk:
            # The chunk that ends the choice names the message; the last one, without a choice, has
            # the numbers. Chunks are added up, so each says its part alone.
            (_name if chunk["choices"] else _number)(made.message, chunk)
        return made


def _name(message: BaseMessage, told: Mapping[str, Any]) -> None:
    message.id = told["choreo"]["id"]
    message.response_metadata.setdefault("choreo", {}).update(told["choreo"])


def _number(message: BaseMessage, told: Mapping[str, Any]) -> None:
    usage = told.get("usage") or {}
    numbers = {key: usage[key] for key in _NUMBERS if key in usage}
    message.response_metadata.setdefault("choreo", {}).update(numbers)
