# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: a draft and two reviews of it, which start in the engine when the draft is complete.

vllm serve MODEL --plugin choreo --api-key secret
python examples/online.py --api-key secret
"""

from __future__ import annotations

import argparse
import asyncio

from vllm_choreo import AsyncChoreoClient, ChoreoClient, Message


def turn(role: str, text: str) -> str:
    """One turn of a chat, as this model was trained on it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def answered(url: str, api_key: str | None, max_tokens: int) -> Message:
    """One question about two facts, which later questions would read as they are."""
    with ChoreoClient(url, api_key) as c:
        facts = ("The shed is green.", "Anna owns a red bicycle.")
        parents = c.prefill([{"tokens": turn("user", text)} for text in facts])
        header = turn("user", "What colour is the shed?") + "<|im_start|>assistant\n"
        params = {"temperature": 0, "max_tokens": max_tokens}
        return c.decode(header, parents=parents, sampling_params=params)


async def reviewed(url: str, api_key: str | None, max_tokens: int) -> list[Message]:
    """Reviews of a draft that is still being written when they are asked for."""
    params = {"temperature": 0, "max_tokens": max_tokens}
    async with AsyncChoreoClient(url, api_key) as c:
        task = await c.prefill(turn("user", "Describe a shed in one sentence."))
        header = "<|im_start|>assistant\n"
        draft = await c.submit(header=header, parents=[task], sampling_params=params)
        asks = ("What is missing?", "What is wrong?")
        return await c.decode(
            [{"header": turn("user", ask) + header, "parents": [task, draft]} for ask in asks],
            sampling_params=params,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    given = args.base_url, args.api_key, args.max_tokens
    for message in (answered(*given), *asyncio.run(reviewed(*given))):
        print(f"{message.generated_text!r}")
        print(f"  {message.usage.reused_tokens} tokens reused")


if __name__ == "__main__":
    main()
