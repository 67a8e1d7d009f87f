# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts, one level: candidates in parallel, votes over all of them, an answer.

Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models" (2023). Each
voter reads its own role and then every candidate. As text, no two voters with roles of their own
share a prefix; choreographed, they all read the candidates where they lie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.workflows.chat import assistant, system, user
from vllm_choreo.workflows.transcript import Step, Transcript

BALLOT = "Compare the candidates. Which one is the best? Give its number and your reason."
FINISH = "Write the final answer, following the candidate above."


def tree_of_thoughts(
    c: Any,
    question: str,
    voters: Sequence[str],
    num_candidates: int = 4,
    sampling_params: Any = None,
    vote_params: Any = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run one level of the tree.

    Args:
        c: a `Choreography`, in any mode.
        question: what is to be solved.
        voters: one system prompt per voter; equal ones are encoded once.
        num_candidates: how many thoughts are voted on.
        sampling_params: of candidates and of the answer; each candidate gets a seed of its own.
        vote_params: of the votes; None: as `sampling_params`.
        on_step: called with each call when it is done.

    Returns:
        The calls; `answers` holds the final one.
    """
    log = Transcript("tree of thoughts", c.mode, on_step)
    numbers = range(1, num_candidates + 1)

    task = log.add("task", "question", c.prefill(user(question)))
    ballot = log.add("task", "ballot", c.prefill(user(BALLOT), parents=[task]))
    finish = log.add("task", "finish", c.prefill(user(FINISH), parents=[task]))
    texts = list(dict.fromkeys(voters))
    roles = c.prefill([{"tokens": system(text)} for text in texts])
    log.add_all("task", [f"voter {voters.index(text) + 1}" for text in texts], roles)

    calls = [
        {
            "header": assistant(f"Candidate {number}: "),
            "parents": [task],
            "sampling_params": _seeded(sampling_params, number),
        }
        for number in numbers
    ]
    thoughts = c.decode(calls)
    log.add_all("candidates", [f"candidate {number}" for number in numbers], thoughts)

    calls = [
        {
            "header": assistant("The best is candidate number "),
            "parents": [roles[texts.index(text)], task, *thoughts, ballot],
            "sampling_params": _seeded(vote_params or sampling_params, number),
        }
        for number, text in enumerate(voters, start=1)
    ]
    votes = c.decode(calls)
    log.add_all("votes", [f"voter {i + 1}" for i in range(len(voters))], votes)

    best = elected([vote.generated_text for vote in votes], num_candidates)
    answer = c.decode(
        assistant("Final answer: "),
        parents=[task, thoughts[best - 1], finish],
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])


def elected(votes: Sequence[str], num_candidates: int) -> int:
    """The candidate, from 1, that most votes begin with; the first one of equals.

    A vote in which no candidate's number is found is not counted. Without any vote, candidate 1.
    """
    counts: Counter[int] = Counter()
    for vote in votes:
        for number in re.findall(r"\d+", vote):
            if 1 <= int(number) <= num_candidates:
                counts[int(number)] += 1
                break
    return max(range(1, num_candidates + 1), key=lambda number: (counts[number], -number))


def _seeded(sampling_params: Any, seed: int) -> Any:
    """The same sampling with another seed, so that parallel calls do not all say the same."""
    if sampling_params is None:
        return None
    clone = sampling_params.clone()
    clone.seed = seed
    return clone
