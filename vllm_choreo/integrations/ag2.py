# SPDX-License-Identifier: Apache-2.0
"""`choreo_config`: a model for AG2's agents (formerly AutoGen) over a server with the plugin.

    from ag2 import Agent
    from vllm_choreo.integrations.ag2 import choreo_config

    config = choreo_config("MODEL", "http://localhost:8000/v1", api_key="secret")
    optimist, pessimist = (Agent(name, config=config) for name in ("optimist", "pessimist"))

Agents with one config, or with configs of the same conversations, read one another's messages
without encoding them again. Needs `pip install "vllm-choreo[autogen]"`.
"""

from __future__ import annotations

from ag2.config import OpenAIConfig

from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.integrations.openai_http import ChoreoAsyncHttpClient


class ChoreoModelConfig(OpenAIConfig):
    """AG2's config for OpenAI's API, whose HTTP client names parents."""

    async def end_session(self) -> None:
        """Free what the server holds of these conversations; the next request starts anew."""
        if isinstance(self.http_client, ChoreoAsyncHttpClient):
            await self.http_client.end_session()


def choreo_config(
    model: str,
    base_url: str,
    api_key: str | None = None,
    *,
    conversations: Conversations | None = None,
    **options: object,
) -> ChoreoModelConfig:
    """AG2's config for OpenAI's API, with a client that names parents.

    Args:
        model: name under which the server serves the model.
        base_url: URL of the server, with "/v1".
        api_key: one of the keys that the server was started with; None if it asks for none.
        conversations: conversations shared with other configs; None: new ones, in mode "choreo".
        options: further arguments of `ag2.config.OpenAIConfig`.
    """
    # The SDK insists on a key.
    key = "none" if api_key is None else api_key
    client = ChoreoAsyncHttpClient(conversations)
    return ChoreoModelConfig(model, key, base_url, http_client=client, **options)
