# SPDX-License-Identifier: Apache-2.0
"""Texts around the turns of a chat, as the template of a server's model writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx

from vllm_choreo.chat.turns import ChatTurns, chat_turns
from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.client.failures import content_of, no_answer

_SECONDS = 60.0


def turns_of_server(base_url: str, api_key: str | None) -> ChatTurns:
    """Texts around turns of the model of a server.

    The server renders chats as tokens (`/tokenize`), and says what they are as text.

    Raises:
        ChoreoError: the server does not answer, or its model writes no turns.
    """
    endpoint = Endpoint(base_url, api_key, _SECONDS)
    with httpx.Client(**endpoint.options()) as client:

        def post(path: str, body: Mapping[str, object]) -> Mapping[str, object]:
            try:
                response = client.post(path, json=body)
            except httpx.HTTPError as error:
                raise no_answer(endpoint, error) from error
            return content_of(endpoint, response.status_code, response.content)

        def render(turns: Sequence[Mapping[str, str]], ends: bool) -> str:
            chat = {"messages": list(turns), "add_generation_prompt": ends}
            tokens = post("/tokenize", chat)["tokens"]
            return str(post("/detokenize", {"tokens": tokens})["prompt"])

        return chat_turns(render)
