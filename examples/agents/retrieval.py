# SPDX-License-Identifier: Apache-2.0
"""OpenAI's SDK: a bot answers questions about documents, which are found in changing order."""

from __future__ import annotations

import random
import time

from both_ways import Way, compare
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from vllm_choreo.integrations.openai_http import ChoreoHttpClient

QUESTIONS = 4
SYSTEM: ChatCompletionMessageParam = {
    "role": "system",
    "content": "You answer from the documents.",
}


def run(way: Way) -> None:
    """A retrieval bot whose documents come in changing order."""
    http = ChoreoHttpClient(way.conversations)
    client = OpenAI(base_url=way.base_url, api_key=way.api_key, http_client=http)
    documents, rng = way.documents(), random.Random(0)
    for number in range(QUESTIONS):
        found = rng.sample(documents, len(documents))
        question = f"Question {number}: what is kept in the cupboard?"
        messages: list[ChatCompletionMessageParam] = [SYSTEM]
        for text in (*found, question):
            messages.append({"role": "user", "content": text})
        asked = time.perf_counter()
        stream = client.chat.completions.create(
            model=way.model,
            messages=messages,
            max_tokens=way.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = ""
        for chunk in stream:
            if not answer and chunk.choices and chunk.choices[0].delta.content:
                way.first_tokens.append(time.perf_counter() - asked)
            answer += "".join(choice.delta.content or "" for choice in chunk.choices)
        way.said.append(answer)
    http.end_session()


if __name__ == "__main__":
    compare(run)
