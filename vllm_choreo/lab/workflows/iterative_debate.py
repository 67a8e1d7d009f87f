# SPDX-License-Identifier: Apache-2.0
"""Iterative debate: two sides speak in turn, a moderator decides when it is enough, and concludes.

Liang et al., "Encouraging Divergent Thinking in Large Language Models through Multi-Agent Debate"
(2023). What the debaters say joins the context that all share; the moderator's verdicts do not.
Each agent reads its role first, so as text each encodes what the others said since its last turn;
choreographed, a turn is encoded once, by the side that spoke.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.workflows.chat import assistant, restated, system, user
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

ROLES = {
    "affirmative": "You are a debater on the affirmative side. Answer the question and defend your "
    "answer. Reply to what the other side says, step by step.",
    "negative": "You are a debater on the negative side. You doubt the affirmative side's answer: "
    "say what is wrong with it and give your own, step by step.",
    "moderator": "You are the moderator of a debate between two sides who answer a question. You "
    "judge what they say by whether it is right.",
}
JUDGE = "Do the sides agree on a right answer? Say STOP if they do, CONTINUE if not, and why."
CONCLUDE = "The debate is over. Give the right answer to the question, and how it is found."


def iterative_debate(
    c: Facade,
    question: str,
    *,
    rounds: int = 3,
    sampling_params: Sampling = None,
    verdict_params: Sampling = None,
    restate: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run a debate; see `vllm_choreo.lab.workflows`. The answer is the moderator's.

    Args:
        question: question of the debate.
        rounds: how often each side may speak.
        verdict_params: sampling parameters of the moderator's verdicts; None: `sampling_params`.
        restate: the moderator is given the question once more, after all that it reads.
    """
    inputs: dict[str, Any] = {"question": question, "rounds": rounds, "restate": restate}
    inputs |= {"sampling_params": sampling_params, "verdict_params": verdict_params}
    log = Transcript("iterative_debate", c.mode, inputs, on_step)
    texts = {"question": user(question)} | {side: system(ROLES[side]) for side in ROLES}
    messages = c.prefill([{"tokens": text, "role": role} for role, text in texts.items()])
    task, affirmative, negative, moderator = log.add_all("task", list(texts), messages)
    read = [moderator, task]
    requests = [
        {"tokens": user(text), "parents": read, "role": role}
        for role, text in (("judge", JUDGE), ("conclude", CONCLUDE))
    ]
    judge, conclude = log.add_all("task", ["judge", "conclude"], c.prefill(requests))

    again = restated(question) if restate else ""
    turns: list[Message] = []
    for number in range(1, rounds + 1):
        for side, role in (("affirmative", affirmative), ("negative", negative)):
            parents = [role, task, *turns]
            turns.append(_say(c, log, f"round {number}", side, parents, sampling_params))
        if number < rounds:
            parents = [moderator, task, *turns, judge]
            params = verdict_params or sampling_params
            verdict = _say(c, log, f"verdict {number}", "moderator", parents, params, again)
            if is_settled(verdict.generated_text):
                break
    parents = [moderator, task, *turns, conclude]
    answer = _say(c, log, "answer", "moderator", parents, sampling_params, again)
    return log.finish([answer.generated_text])


def _say(
    c: Facade,
    log: Transcript,
    stage: str,
    author: str,
    parents: list[Message],
    sampling_params: Sampling,
    again: str = "",
) -> Message:
    answer = c.decode(
        again + assistant(f"{author.capitalize()}:"),
        parents=parents,
        role=stage.partition(" ")[0],
        sampling_params=seeded(sampling_params, len(log.steps)),
    )
    return log.add(stage, author, answer)


def is_settled(verdict: str) -> bool:
    """Return whether the first of the words "stop" and "continue" is "stop"; without either, no.

    "Do not stop" and "don't stop" mean that the debate goes on.
    """
    found = re.search(r"(\bnot\s+|n['’]t\s+)?\b(stop|continu)", verdict.lower())
    return found is not None and (found[2] == "stop") == (found[1] is None)
