# SPDX-License-Identifier: Apache-2.0
"""Parallel debate: agents answer a question, then revise after reading each other, round by round.

All agents of a round speak at once (Du et al., "Improving Factuality and Reasoning in Language
Models through Multiagent Debate", 2023). Each reads its role, the question, and every answer of
the rounds before. As text, each agent's prompt is another one, so no prefix holds the answers of
the others; choreographed, an answer is encoded once, by the agent that wrote it.

In the layout "paper" an agent reads the question, what it is to do, and the answers that the others
gave in the last round, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.lab.workflows.variants import check_layout, with_layout
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

ANSWER_FIRST = (
    "Give your answer. If other agents' answers follow, take them as additional information."
)
REVISE = "Read the other answers. Say what is wrong with them, then give your final answer."


def parallel_debate(
    c: Facade,
    question: str,
    *,
    agents: int | Sequence[str] = 3,
    rounds: int = 3,
    sampling_params: Sampling = None,
    restate: bool = False,
    layout: str = "standard",
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run a debate; see `vllm_choreo.lab.workflows`. The answers are each agent's last one.

    Args:
        question: question of the debate.
        agents: number of agents, or one system prompt for each.
        rounds: how often each agent speaks.
        restate: whoever revises is given the question once more, after all that it reads.
        layout: "standard" or "paper": see `variants`.

    Raises:
        ChoreoError: no such layout.
    """
    check_layout(layout)
    inputs: dict[str, Any] = {"question": question, "agents": agents, "rounds": rounds}
    inputs |= {"sampling_params": sampling_params, "restate": restate}
    inputs = with_layout(inputs, layout)
    c, chat, log = open_chat("parallel_debate", c, inputs, turns, on_step)
    task = log.add("task", "question", c.prefill(chat.user(question), role="question"))
    text = ANSWER_FIRST if layout == "paper" else REVISE
    revise = log.add("task", "revise", c.prefill(chat.user(text), parents=[task], role="revise"))
    given = [task, revise] if layout == "paper" else [task]
    begun = [[*role, *given] for role in _roles(c, chat, log, agents)]
    history = [list(parents) for parents in begun]
    names = _names(len(history))

    answers: list[Message] = []
    for number in range(1, rounds + 1):
        again = chat.restated(question) if restate and number > 1 else ""
        calls = [
            {
                "header": again + chat.assistant(f"{name}:"),
                "parents": parents,
                "sampling_params": seeded(sampling_params, number * len(names) + i),
            }
            for i, (name, parents) in enumerate(zip(names, history, strict=True))
        ]
        answers = log.add_all(f"round {number}", names, c.decode(calls, role="answer"))
        history = _next_parents(layout, begun, history, answers, revise)

    return log.finish([answer.generated_text for answer in answers])


def _next_parents(
    layout: str,
    begun: Sequence[Sequence[Message]],
    history: Sequence[Sequence[Message]],
    answers: Sequence[Message],
    revise: Message,
) -> list[list[Message]]:
    """Messages that each agent reads in the next round.

    Args:
        begun: messages that each reads in the first round.
        history: messages that each has read in this one.
        answers: messages that each has made in it.
    """
    read = []
    for i, answer in enumerate(answers):
        others = [*answers[:i], *answers[i + 1 :]]
        if layout == "paper":
            read.append([*begun[i], *others])
        else:
            # Its own answer first: as text, the prompt of the next round then begins with that of
            # this round, which is all that a prefix cache can hope for.
            read.append([*history[i], answer, *others, revise])
    return read


def _names(count: int) -> list[str]:
    return [f"agent {number}" for number in range(1, count + 1)]


def _roles(
    c: Facade, chat: ChatTurns, log: Transcript, agents: int | Sequence[str]
) -> list[list[Message]]:
    """Messages that each agent reads before all else: its role, or none."""
    if isinstance(agents, int):
        return [[] for _ in range(agents)]
    messages = c.prefill([{"tokens": chat.system(text)} for text in agents], role="agent")
    return [[role] for role in log.add_all("task", _names(len(agents)), messages)]
