# SPDX-License-Identifier: Apache-2.0
"""Parallel debate: agents answer a question, then revise after reading each other, round by round.

All agents of a round speak at once (Du et al., "Improving Factuality and Reasoning in Language
Models through Multiagent Debate", 2023). Each reads its role, the question, and every answer of
the rounds before. As text, each agent's prompt is another one, so no prefix holds the answers of
the others; choreographed, an answer is encoded once, by the agent that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.workflows.chat import assistant, system, user
from vllm_choreo.workflows.transcript import Step, Transcript

REVISE = "Read the other answers. Say what is wrong with them, then give your final answer."


def parallel_debate(
    c: Any,
    question: str,
    roles: Sequence[str],
    rounds: int = 3,
    sampling_params: Any = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run a debate.

    Args:
        c: a `Choreography`, in any mode.
        question: what is debated.
        roles: one system prompt per agent.
        rounds: how often each agent speaks.
        sampling_params: of every answer.
        on_step: called with each call when it is done.

    Returns:
        The calls; `answers` holds each agent's last one.
    """
    log = Transcript("parallel debate", c.mode, on_step)
    agents = [f"agent {i + 1}" for i in range(len(roles))]

    task = log.add("task", "question", c.prefill(user(question)))
    revise = log.add("task", "revise", c.prefill(user(REVISE), parents=[task]))
    role = log.add_all("task", agents, c.prefill([{"tokens": system(text)} for text in roles]))

    history = [[role[i], task] for i in range(len(agents))]
    answers: list[Any] = []
    for number in range(1, rounds + 1):
        calls = [
            {"header": assistant(f"{name}: "), "parents": parents}
            for name, parents in zip(agents, history, strict=True)
        ]
        answers = c.decode(calls, sampling_params=sampling_params)
        log.add_all(f"round {number}", agents, answers)
        for i, parents in enumerate(history):
            others = answers[:i] + answers[i + 1 :]
            # Its own answer first: as text, the prompt of the next round then begins with that of
            # this round, which is all that a prefix cache can hope for.
            parents += [answers[i], *others, revise]

    return log.finish([answer.generated_text for answer in answers])
