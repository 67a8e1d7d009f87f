# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts, one level: candidates in parallel, votes over all of them, an answer.

Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models" (2023).
Identical voters read the question, every candidate and a ballot; as text, their prompts are one
prompt. Voters with a role of their own read it first, so that as text no two of them share a
prefix. Choreographed, all of them read the candidates where they lie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.workflows.chat import assistant, restated, system, user
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

BALLOT = "Compare the candidates. Which one is the best? Give its number and your reason."
FINISH = "Write the final answer, following the candidate above."


def tree_of_thoughts(
    c: Facade,
    question: str,
    *,
    candidates: int = 8,
    voters: int | Sequence[str] = 4,
    sampling_params: Sampling = None,
    vote_params: Sampling = None,
    restate: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run one level of the tree; see `vllm_choreo.lab.workflows`. One answer.

    Args:
        question: question to be solved.
        candidates: how many thoughts are voted on.
        voters: number of voters, all alike; or one system prompt for each.
        vote_params: sampling parameters of the votes; None: `sampling_params`.
        restate: votes and the answer are given the question once more, after all that they read.
    """
    inputs: dict[str, Any] = {"question": question, "candidates": candidates, "voters": voters}
    inputs["restate"] = restate
    again = restated(question) if restate else ""
    inputs |= {"sampling_params": sampling_params, "vote_params": vote_params}
    log = Transcript("tree_of_thoughts", c.mode, inputs, on_step)

    task = log.add("task", "question", c.prefill(user(question), role="question"))
    requests = [
        {"tokens": user(text), "parents": [task], "role": role}
        for role, text in (("ballot", BALLOT), ("finish", FINISH))
    ]
    ballot, finish = log.add_all("task", ["ballot", "finish"], c.prefill(requests))
    roles = _roles(c, log, voters)

    thoughts = _think(c, log, task, candidates, sampling_params)
    readings = [[*role, task, *thoughts, ballot] for role in roles]
    votes = _vote(c, log, readings, again, vote_params or sampling_params)
    best = elected([vote.generated_text for vote in votes], candidates)
    answer = c.decode(
        again + assistant("Final answer:"),
        parents=[task, thoughts[best - 1], finish],
        role="answer",
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])


def _roles(c: Facade, log: Transcript, voters: int | Sequence[str]) -> list[list[Message]]:
    """Messages that each voter reads before all else: its role, or none. Equal roles are one."""
    if isinstance(voters, int):
        return [[] for _ in range(voters)]
    texts = list(dict.fromkeys(voters))
    authors = [f"voter {voters.index(text) + 1}" for text in texts]
    calls = [{"tokens": system(text), "role": "voter"} for text in texts]
    messages = log.add_all("task", authors, c.prefill(calls))
    return [[messages[texts.index(text)]] for text in voters]


def _think(
    c: Facade, log: Transcript, task: Message, count: int, sampling_params: Sampling
) -> list[Message]:
    calls = [
        {
            "header": assistant(f"Candidate {number}:"),
            "parents": [task],
            "sampling_params": seeded(sampling_params, number),
        }
        for number in range(1, count + 1)
    ]
    authors = [f"candidate {number}" for number in range(1, count + 1)]
    return log.add_all("candidates", authors, c.decode(calls, role="candidate"))


def _vote(
    c: Facade,
    log: Transcript,
    readings: Sequence[Sequence[Message]],
    again: str,
    sampling_params: Sampling,
) -> list[Message]:
    calls = [
        {
            "header": again + assistant("The best is candidate number"),
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
