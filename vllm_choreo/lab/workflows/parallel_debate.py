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

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.workflows.chat import assistant, restated, system, user
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

REVISE = "Read the other answers. Say what is wrong with them, then give your final answer."


def parallel_debate(
    c: Facade,
    question: str,
    *,
    agents: int | Sequence[str] = 3,
    rounds: int = 3,
    sampling_params: Sampling = None,
    restate: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run a debate; see `vllm_choreo.lab.workflows`. The answers are each agent's last one.

    Args:
        question: question of the debate.
        agents: number of agents, or one system prompt for each.
        rounds: how often each agent speaks.
        restate: whoever revises is given the question once more, after all that it reads.
    """
    inputs: dict[str, Any] = {"question": question, "agents": agents, "rounds": rounds}
    inputs |= {"sampling_params": sampling_params, "restate": restate}
    log = Transcript("parallel_debate", c.mode, inputs, on_step)
    task = log.add("task", "question", c.prefill(user(question), role="question"))
    revise = log.add("task", "revise", c.prefill(user(REVISE), parents=[task], role="revise"))
    history = [[*role, task] for role in _roles(c, log, agents)]
    names = _names(len(history))

    answers: list[Message] = []
    for number in range(1, rounds + 1):
        again = restated(question) if restate and number > 1 else ""
        calls = [
            {
                "header": again + assistant(f"{name}:"),
                "parents": parents,
                "sampling_params": seeded(sampling_params, number * len(names) + i),
            }
            for i, (name, parents) in enumerate(zip(names, history, strict=True))
        ]
        answers = log.add_all(f"round {number}", names, c.decode(calls, role="answer"))
        for i, parents in enumerate(history):
            others = answers[:i] + answers[i + 1 :]
            # Its own answer first: as text, the prompt of the next round then begins with that of
            # this round, which is all that a prefix cache can hope for.
            parents += [answers[i], *others, revise]

    return log.finish([answer.generated_text for answer in answers])


def _names(count: int) -> list[str]:
    return [f"agent {number}" for number in range(1, count + 1)]


def _roles(c: Facade, log: Transcript, agents: int | Sequence[str]) -> list[list[Message]]:
    """Messages that each agent reads before all else: its role, or none."""
    if isinstance(agents, int):
        return [[] for _ in range(agents)]
    messages = c.prefill([{"tokens": system(text)} for text in agents], role="agent")
    return [[role] for role in log.add_all("task", _names(len(agents)), messages)]
