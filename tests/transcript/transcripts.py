# SPDX-License-Identifier: Apache-2.0
"""Transcripts in the JSON of `Transcript.to_json`, made by hand: a debate of three agents."""

from __future__ import annotations

from typing import Any

AGENTS = ("agent 1", "agent 2", "agent 3")
HOSTILE = '</script><img src=x onerror="document.title=\'owned\'"> & <!-- \u2028 "quotes"'


def step(stage: str, author: str, number: int, parents: list[list[Any]], **more: Any) -> Any:
    """One step; a decode if `generated` is among `more`."""
    generated = more.pop("generated", "")
    given = more.pop("given", f"<|im_start|>user\n{author} is asked in {stage}.<|im_end|>\n")
    generated_ids = list(range(len(generated) // 4))
    return {
        "stage": stage,
        "author": author,
        "kind": "decode" if generated else "prefill",
        "id": f"s/{number}",
        "parents": parents,
        "position": 17 * number,
        "num_tokens": 20 + len(generated_ids),
        "token_ids": list(range(20 + len(generated_ids))),
        "text": given + generated,
        "generated_token_ids": generated_ids,
        "generated_text": generated,
        "finish_reason": "stop" if generated else None,
        "usage": {
            "exact": not parents,
            "reused_tokens": 60 * len(parents),
            "repositioned_tokens": 30 * len(parents),
            "encoded_tokens": 20 + len(generated_ids),
        },
        "metrics": {
            "submitted": more["submitted"],
            "waiting": more.get("waiting", 0.002),
            "ttft": more["ttft"],
            "latency": more.get("latency", more["ttft"]),
        },
    }


def debate(mode: str = "choreo", rounds: int = 3, slow: float = 1.0, text: str = "") -> Any:
    """A debate: each round reads all rounds before. `slow` stretches the prefills."""
    steps = [step("task", "question", 0, [], submitted=0.0, ttft=0.03)]
    steps.append(step("task", "revise", 1, [["s/0", None, None]], submitted=0.03, ttft=0.02))
    for agent in AGENTS:
        steps.append(step("task", agent, len(steps), [], submitted=0.05, ttft=0.04))
    answers: list[str] = []
    clock = 0.1
    for number in range(1, rounds + 1):
        before = [[answer, None, None] for answer in answers] + [["s/0", 2, 9]] * 1
        ids = []
        for i, agent in enumerate(AGENTS):
            ids.append(f"s/{len(steps)}")
            words = (
                text or f"In round {number} {agent} says that twice {i + 2} is {2 * i + 4}. " * 3
            )
            parents = [[f"s/{2 + i}", None, None], *before]
            steps.append(
                step(
                    f"round {number}",
                    agent,
                    len(steps),
                    parents,
                    generated=words,
                    submitted=clock,
                    waiting=0.01 * slow * i,
                    ttft=0.05 * slow * number,
                    latency=0.05 * slow * number + 1 + 0.2 * i,
                )
            )
        answers += ids
        clock += 0.05 * slow * number + 1.4
    return {
        "format": 1,
        "workflow": "parallel_debate",
        "mode": mode,
        "seconds": clock,
        "answers": [step["generated_text"] for step in steps[-3:]],
        "inputs": {"question": "What is twice three?"},
        "steps": steps,
    }
