# SPDX-License-Identifier: Apache-2.0
"""AG2 (formerly AutoGen): three agents with prompts of their own take turns in one conversation."""

from __future__ import annotations

import asyncio
import time

from ag2 import Agent, MemoryStream
from ag2.events import ModelMessageChunk
from both_ways import Way, compare

from vllm_choreo.integrations.ag2 import choreo_config

ROLES = {
    "Ada": "You are Ada, an engineer. You are brief.",
    "Bob": "You are Bob, a gardener. You are brief.",
    "Eve": "You are Eve, who doubts everything. You are brief.",
}
ROUNDS = 2


async def chat(way: Way) -> None:
    config = choreo_config(
        way.model, way.base_url, way.api_key, conversations=way.conversations,
        temperature=0, max_tokens=way.max_tokens, streaming=True,
    )  # fmt: skip
    agents = [Agent(name, role, config=config) for name, role in ROLES.items()]
    conversation = MemoryStream()
    asked = 0.0
    is_waiting = False

    async def said(_: ModelMessageChunk) -> None:
        nonlocal is_waiting
        if is_waiting:
            way.first_tokens.append(time.perf_counter() - asked)
        is_waiting = False

    conversation.where(ModelMessageChunk).subscribe(said)
    topic = "\n\n".join([*way.documents(), "What is to be done with the house?"])
    for turn in range(ROUNDS * len(agents)):
        agent = agents[turn % len(agents)]
        text = topic if turn == 0 else f"{agent.name}, what do you think?"
        asked, is_waiting = time.perf_counter(), True
        reply = await agent.ask(text, stream=conversation)
        way.said.append(reply.body or "")
    await config.end_session()


def run(way: Way) -> None:
    """A group chat of three agents."""
    asyncio.run(chat(way))


if __name__ == "__main__":
    compare(run)
