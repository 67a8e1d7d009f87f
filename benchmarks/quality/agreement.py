# SPDX-License-Identifier: Apache-2.0
"""How far choreographed next-token distributions are from those of the same text as one prompt.

The context is a debate: two agents with roles of their own answer a question at once, then one of
them reads both answers and revises its own. The baseline's revision is forced on the other ways of
encoding the same tokens, and at each of its tokens the distributions over the whole vocabulary are
compared. As the baseline is greedy, the first token at which another one is more likely is the
first that would differ if both ran freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.distributions import distributions, forcing
from vllm_choreo.lab.study.divergence import kl_per_token
from vllm_choreo.lab.workflows.chat import assistant, system, user
from vllm_choreo.lab.workflows.parallel_debate import REVISE

ROLES = (
    "You are a careful mathematician. You check every step.",
    "You are a quick problem solver. You look for the shortest way.",
)
ANSWER_TOKENS = 64
REVISION_TOKENS = 48
# A token's log-probabilities take 6 MB as Python's numbers: this many revisions at a time.
GROUP = 4

# What the revision reads, in this order, and what each message was encoded with.
READ = ("role", "task", "answer", "other answer", "revise")
DEBATE = {
    "role": (),
    "other role": (),
    "task": (),
    "answer": ("role", "task"),
    "other answer": ("other role", "task"),
    "revise": ("task",),
}
ALONE: dict[str, tuple[str, ...]] = dict.fromkeys(DEBATE, ())
# Name, mode, and what each message is encoded with.
WAYS = (
    ("exact", "exact", DEBATE),
    ("choreo", "choreo", DEBATE),
    ("choreo, every message alone", "choreo", ALONE),
)

# The token ids of each message of a context, by name.
Context = Mapping[str, Sequence[int]]


def measure(llm: Any, questions: Sequence[str]) -> list[dict[str, Any]]:
    """One row per question and way; see `compare`."""
    rows = []
    for start in range(0, len(questions), GROUP):
        contexts = _contexts(llm, questions[start : start + GROUP])
        tokens, expected = _revisions(llm, "baseline", DEBATE, contexts, None)
        for way, mode, parents in WAYS:
            _, found = _revisions(llm, mode, parents, contexts, tokens)
            for i, (base, other) in enumerate(zip(expected, found, strict=True)):
                rows.append({"question": start + i + 1, "way": way, **compare(base, other)})
        print(f"agreement: {start + len(contexts)} of {len(questions)} questions", flush=True)
    return rows


def compare(base: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Two sequences of distributions, given the same tokens before each.

    Args:
        base, other: natural log-probabilities, [num_tokens, vocab_size].

    Returns:
        `tokens`; `first`, the number of tokens before the first whose most likely one differs
        (`tokens` if none does); `kl`, the mean of KL(base || other) in nats; `top1`, the share of
        tokens at which the most likely one is the same.
    """
    same = base.argmax(axis=1) == other.argmax(axis=1)
    kl = kl_per_token(base, other)
    first = len(same) if same.all() else int(np.argmin(same))
    return {"tokens": len(same), "first": first, "kl": kl.mean(), "top1": same.mean()}


# -- the debate ----------------------------------------------------------------------------------


def _contexts(llm: Any, questions: Sequence[str]) -> list[Context]:
    """What both agents said in the baseline, and all that the revision reads beside it."""
    from vllm_choreo import Choreography

    with Choreography(llm, mode="baseline") as c:
        roles = [c.prefill(system(text)) for text in ROLES]
        tasks = c.prefill([{"tokens": user(question)} for question in questions])
        revise = c.prefill(user(REVISE))
        calls = [
            {"header": assistant(f"agent {i}: "), "parents": [role, task]}
            for task in tasks
            for i, role in enumerate(roles, start=1)
        ]
        answers = c.decode(calls, sampling_params=_greedy(ANSWER_TOKENS))
        return [
            {
                "role": roles[0].token_ids,
                "other role": roles[1].token_ids,
                "task": task.token_ids,
                "answer": answers[2 * i].token_ids,
                "other answer": answers[2 * i + 1].token_ids,
                "revise": revise.token_ids,
            }
            for i, task in enumerate(tasks)
        ]


def _revisions(
    llm: Any,
    mode: str,
    parents: Mapping[str, Sequence[str]],
    contexts: Sequence[Context],
    forced: Sequence[Sequence[int]] | None,
) -> tuple[list[Sequence[int]], list[np.ndarray]]:
    """The revision of each context: its tokens, and their log-probabilities."""
    from vllm_choreo import Choreography

    with Choreography(llm, mode=mode) as c:
        made: list[dict[str, Any]] = [{} for _ in contexts]
        for name, read in parents.items():
            calls = [
                {"tokens": context[name], "parents": [messages[other] for other in read]}
                for context, messages in zip(contexts, made, strict=True)
            ]
            for messages, message in zip(made, c.prefill(calls), strict=True):
                messages[name] = message
        calls = [
            {
                "header": assistant("agent 1: "),
                "parents": [messages[name] for name in READ],
                "sampling_params": _with_logprobs(None if forced is None else forced[i]),
            }
            for i, messages in enumerate(made)
        ]
        revisions = c.decode(calls)
        tokens: list[Sequence[int]] = [message.generated_token_ids for message in revisions]
        if forced is not None and tokens != forced:
            raise RuntimeError("the engine did not generate the forced tokens")
        return tokens, [distributions(message.logprobs) for message in revisions]


def _greedy(max_tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def _with_logprobs(tokens: Sequence[int] | None) -> Any:
    """The whole vocabulary's log-probabilities, of free or forced tokens."""
    options: dict[str, Any] = {"logprobs": -1, "flat_logprobs": True, "detokenize": False}
    if tokens is None:
        return _greedy(REVISION_TOKENS, **options)
    return forcing(tokens, **options)
