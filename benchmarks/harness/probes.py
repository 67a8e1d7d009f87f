# SPDX-License-Identifier: Apache-2.0
"""Calls on an engine in this process: the law that must hold, and what a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.engine import empty_caches

HEADERS = (1, 8, 24, 64, 256, 1024)  # tokens of the probes for the cost model

ROLES = (
    "You are a careful reader. Answer from the text alone.",
    "You are a sceptic. Doubt the first answer that comes to mind.",
    "You are a teacher. Explain so that a child understands.",
    "You are an editor. Answer as briefly as you can.",
)
QUESTION = (
    "The village needs a new bridge. A wooden bridge costs 40,000 pounds, can be built in three "
    "months and lasts 20 years. A steel bridge costs 90,000 pounds, takes eight months and lasts "
    "60 years, but must be painted every ten years for 5,000 pounds. The village has 100,000 "
    "pounds and its school is on the other side of the river.\n\nWhich bridge should it build?"
)


def chain_tokens(llm: Any, client: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Two greedy answers, each after the whole history: the same in every mode that is right."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography
    from vllm_choreo.lab.workflows.chat import assistant, system, user

    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    empty_caches(llm)
    with Choreography(llm, **client) as c:
        role = c.prefill(system(ROLES[0]))
        task = c.prefill(user(QUESTION), parents=[role])
        history = [role, task]
        for _ in range(2):
            history.append(c.decode(assistant(), parents=list(history), sampling_params=greedy))
        return [message.token_ids for message in history]


def block_chain_tokens(llm: Any, client: Mapping[str, str]) -> tuple[int, ...]:
    """A greedy answer after messages of whole blocks, which no padding sets apart from their text.

    So keys are rotated by the same angles in every mode, and 8 bits round them alike.
    """
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    size = llm.llm_engine.vllm_config.cache_config.block_size
    texts = [[5 + (7 * i + 3 * n) % 400 for i in range(2 * size)] for n in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    empty_caches(llm)
    with Choreography(llm, **client) as c:
        history: list[Any] = []
        for text in texts:
            history.append(c.prefill(text, parents=list(history)))
        return c.decode([7, 8, 9], parents=history, sampling_params=params).generated_token_ids


def step_times(llm: Any, client: Mapping[str, str], repeats: int) -> list[dict[str, Any]]:
    """Seconds to first token of one call with a header of so many tokens, and nothing to reuse."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rows = []
    for tokens in HEADERS:
        for repeat in range(repeats):
            empty_caches(llm)
            with Choreography(llm, **client) as c:
                # No header is the beginning of another one.
                header = [1000 + repeat, *range(2000, 1999 + tokens)]
                message = c.decode(header, sampling_params=one)
            rows.append({"header_tokens": tokens, "ttft_s": round(message.metrics.ttft, 5)})
    return rows
