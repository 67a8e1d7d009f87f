# SPDX-License-Identifier: Apache-2.0
"""Iterative debate: two sides speak in turn, a moderator decides when it is enough, and concludes.

Liang et al., "Encouraging Divergent Thinking in Large Language Models through Multi-Agent Debate"
(2023). What the debaters say joins the context that all share; the moderator's verdicts do not.
Each agent reads its role first, so as text each encodes what the others said since its last turn;
choreographed, a turn is encoded once, by the side that spoke.

In the layout "paper" each agent has one prompt, which says the question too, and the moderator
speaks in every round: what it says last is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.lab.workflows.variants import check_layout, with_layout
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
VERDICT = "After every round say STOP if the sides agree on a right answer, CONTINUE if not, and "
VERDICT += "give the answer that you hold to be right."
CONCLUDE = "The debate is over. Give the right answer to the question, and how it is found."


def iterative_debate(
    c: Facade,
    question: str,
    *,
    rounds: int = 3,
    sampling_params: Sampling = None,
    verdict_params: Sampling = None,
    restate: bool = False,
    layout: str = "standard",
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Run a debate; see `vllm_choreo.lab.workflows`. The answer is the moderator's.

    Args:
        question: question of the debate.
        rounds: how often each side may speak.
        verdict_params: sampling parameters of the moderator's verdicts; None: `sampling_params`.
        restate: the moderator is given the question once more, after all that it reads; not in the
            layout "paper".
        layout: "standard" or "paper": see `variants`.

    Raises:
        ChoreoError: no such layout, or `restate` in the layout "paper".
    """
    check_layout(layout)
    if restate and layout == "paper":
        raise ChoreoError(
            'the prompts of the layout "paper" say the question, and nothing follows what is read: '
            "leave out restate",
            parameter="restate",
            value=restate,
        )
    inputs: dict[str, Any] = {"question": question, "rounds": rounds, "restate": restate}
    inputs |= {"sampling_params": sampling_params, "verdict_params": verdict_params}
    inputs = with_layout(inputs, layout)
    c, chat, log = open_chat("iterative_debate", c, inputs, turns, on_step)
    says = partial(_say, c, chat, log)
    sampling = (sampling_params, verdict_params or sampling_params)
    if layout == "paper":
        return _paper(c, chat, log, says, question, rounds, sampling)
    again = chat.restated(question) if restate else ""
    return _standard(c, chat, log, says, question, rounds, sampling, again)


def _standard(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    says: Callable[..., Message],
    question: str,
    rounds: int,
    sampling: tuple[Sampling, Sampling],
    again: str,
) -> Transcript:
    """The debate in the layout "standard"; `sampling`: of turns and the answer, and of verdicts."""
    texts = {"question": chat.user(question)}
    texts |= {side: chat.system(role) for side, role in ROLES.items()}
    messages = c.prefill([{"tokens": text, "role": role} for role, text in texts.items()])
    task, affirmative, negative, moderator = log.add_all("task", list(texts), messages)
    read = [moderator, task]
    requests = [
        {"tokens": chat.user(text), "parents": read, "role": role}
        for role, text in (("judge", JUDGE), ("conclude", CONCLUDE))
    ]
    judge, conclude = log.add_all("task", ["judge", "conclude"], c.prefill(requests))

    turns: list[Message] = []
    for number in range(1, rounds + 1):
        for side, role in (("affirmative", affirmative), ("negative", negative)):
            parents = [role, task, *turns]
            turns.append(says(f"round {number}", side, parents, sampling[0]))
        if number < rounds:
            parents = [moderator, task, *turns, judge]
            verdict = says(f"verdict {number}", "moderator", parents, sampling[1], again)
            if is_settled(verdict.generated_text):
                break
    parents = [moderator, task, *turns, conclude]
    answer = says("answer", "moderator", parents, sampling[0], again)
    return log.finish([answer.generated_text])


def _paper(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    says: Callable[..., Message],
    question: str,
    rounds: int,
    sampling: tuple[Sampling, Sampling],
) -> Transcript:
    """The debate in the layout "paper"; `sampling`: of the sides, and of the moderator."""
    roles = {**ROLES, "moderator": f"{ROLES['moderator']} {VERDICT}"}
    requests = [
        {"tokens": chat.system(f"{text}\n\n{question}"), "role": side}
        for side, text in roles.items()
    ]
    prompts = dict(zip(roles, log.add_all("task", list(roles), c.prefill(requests)), strict=True))
    context: list[Message] = []
    verdict = ""
    for number in range(1, rounds + 1):
        for side in ("affirmative", "negative"):
            said = says(f"round {number}", side, [prompts[side], *context], sampling[0])
            context.append(said)
        parents = [prompts["moderator"], *context]
        verdict = says(f"verdict {number}", "moderator", parents, sampling[1]).generated_text
        if is_settled(verdict):
            break
    return log.finish([verdict])


def _say(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    stage: str,
    author: str,
    parents: list[Message],
    sampling_params: Sampling,
    again: str = "",
) -> Message:
    answer = c.decode(
        again + chat.assistant(f"{author.capitalize()}:"),
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
