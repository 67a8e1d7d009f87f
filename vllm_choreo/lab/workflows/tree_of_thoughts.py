# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts, one level: candidates in parallel, votes over all of them, an answer.

Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models" (2023).
Identical voters read the question, every candidate and a ballot; as text, their prompts are one
prompt. Voters with a role of their own read it first, so that as text no two of them share a
prefix. Choreographed, all of them read the candidates where they lie.

In the layout "paper" a voter reads the prompt of the vote and the candidates, and the answer its
own prompt and the best one; each prompt says the question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.lab.workflows.variants import check_layout, with_layout
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

BALLOT = "Compare the candidates. Which one is the best? Give its number and your reason."
FINISH = "Write the final answer, following the candidate above."
BALLOT_FIRST = "Compare the candidates below. Say the number of the best one, and your reason."
FINISH_FIRST = "Write the final answer, following the candidate below."


def tree_of_thoughts(
    c: Facade,
    question: str,
    *,
    candidates: int = 8,
    voters: int | Sequence[str] = 4,
    sampling_params: Sampling = None,
    vote_params: Sampling = None,
    restate: bool = False,
    layout: str = "standard",
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run one level of the tree; see `vllm_choreo.lab.workflows`. One answer.

    Args:
        question: question to be solved.
        candidates: how many thoughts are voted on.
        voters: number of voters, all alike; or one system prompt for each.
        vote_params: sampling parameters of the votes; None: `sampling_params`.
        restate: votes and the answer are given the question once more, after all that they read.
        layout: "standard" or "paper": see `variants`.

    Raises:
        ChoreoError: no such layout.
    """
    check_layout(layout)
    inputs: dict[str, Any] = {"question": question, "candidates": candidates, "voters": voters}
    inputs["restate"] = restate
    inputs |= {"sampling_params": sampling_params, "vote_params": vote_params}
    inputs = with_layout(inputs, layout)
    c, chat, log = open_chat("tree_of_thoughts", c, inputs, turns, on_step)
    again = chat.restated(question) if restate else ""

    task = log.add("task", "question", c.prefill(chat.user(question), role="question"))
    ballot, finish = _prompts(c, chat, log, task, question, layout)
    roles = _roles(c, chat, log, voters)

    thoughts = _think(c, chat, log, task, candidates, sampling_params)
    read = [ballot, *thoughts] if layout == "paper" else [task, *thoughts, ballot]
    readings = [[*role, *read] for role in roles]
    votes = _vote(c, chat, log, readings, again, vote_params or sampling_params)
    best = thoughts[elected([vote.generated_text for vote in votes], candidates) - 1]
    answer = c.decode(
        again + chat.assistant("Final answer:"),
        parents=[finish, best] if layout == "paper" else [task, best, finish],
        role="answer",
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])


def _prompts(
    c: Facade, chat: ChatTurns, log: Transcript, task: Message, question: str, layout: str
) -> list[Message]:
    """The prompts of the vote and of the answer; the paper's stand alone, before the rest."""
    texts, read = (BALLOT, FINISH), [task]
    if layout == "paper":
        texts, read = (f"{question}\n\n{BALLOT_FIRST}", f"{question}\n\n{FINISH_FIRST}"), []
    requests = [
        {"tokens": chat.user(text), "parents": read, "role": role}
        for role, text in zip(("ballot", "finish"), texts, strict=True)
    ]
    return log.add_all("task", ["ballot", "finish"], c.prefill(requests))


def _roles(
    c: Facade, chat: ChatTurns, log: Transcript, voters: int | Sequence[str]
) -> list[list[Message]]:
    """Messages that each voter reads before all else: its role, or none. Equal roles are one."""
    if isinstance(voters, int):
        return [[] for _ in range(voters)]
    texts = list(dict.fromkeys(voters))
    authors = [f"voter {voters.index(text) + 1}" for text in texts]
    calls = [{"tokens": chat.system(text), "role": "voter"} for text in texts]
    messages = log.add_all("task", authors, c.prefill(calls))
    return [[messages[texts.index(text)]] for text in voters]


def _think(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    task: Message,
    count: int,
    sampling_params: Sampling,
) -> list[Message]:
    calls = [
        {
            "header": chat.assistant(f"Candidate {number}:"),
            "parents": [task],
            "sampling_params": seeded(sampling_params, number),
        }
        for number in range(1, count + 1)
    ]
    authors = [f"candidate {number}" for number in range(1, count + 1)]
    return log.add_all("candidates", authors, c.decode(calls, role="candidate"))


def _vote(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    readings: Sequence[Sequence[Message]],
    again: str,
    sampling_params: Sampling,
) -> list[Message]:
    calls = [
        {
            "header": again + chat.assistant("The best is candidate number"),
            "parents": parents,
            "sampling_params": seeded(sampling_params, len(log.steps) + number),
        }
        for number, parents in enumerate(readings, start=1)
    ]
    authors = [f"voter {number}" for number in range(1, len(readings) + 1)]
    return log.add_all("votes", authors, c.decode(calls, role="vote"))


def elected(votes: Sequence[str], candidates: int) -> int:
    """The candidate, from 1, that most votes name first; the first one of equals.

    A vote in which no candidate's number is found is not counted. Without any vote, candidate 1.
    """
    counts: Counter[int] = Counter()
    for vote in votes:
        # Whole numbers alone: neither half of "2.5" is one, "2." is.
        for number in re.findall(r"(?<![\d.])\d+(?!\d|\.\d)", vote):
            if 1 <= int(number) <= candidates:
                counts[int(number)] += 1
                break
    return max(range(1, candidates + 1), key=lambda number: (counts[number], -number))
