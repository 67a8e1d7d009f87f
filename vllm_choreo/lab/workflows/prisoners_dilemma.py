# SPDX-License-Identifier: Apache-2.0
"""Prisoner's dilemma: two agents with private plans talk, then decide whether to cooperate.

Each agent has a system prompt and makes a plan that the other one does not read. But what an agent
says was encoded with both in view, and its keys and values may carry them to whoever reads it: they
leak. `leak` chooses what an utterance carries. Unless it is "both", the utterance is encoded again
with fewer parents before the other agent reads it:

    both      as it was spoken
    system    encoded with the rules, the speaker's system prompt, and the talk so far
    plan      encoded with the rules, the speaker's plan (itself made with the prompt in view), …
    none      encoded with the rules and the talk so far

Bob may be asked, before he decides, what Alice will do. Games are compared in pairs: the second one
is given the plans of the first (`plans_of`), and all else is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

NAMES = ("Alice", "Bob")
LEAKS = ("both", "system", "plan", "none")
STRATEGIES = {
    "none": "",
    "always cooperate": " Whatever the other player says, you cooperate.",
    "always defect": " Whatever the other player says, you defect.",
}
SYSTEM = "You are {}, a player in a game against {}. You want as many points as you can get.{}"
RULES = (
    "Both players choose in secret to cooperate or to defect. If both cooperate, each gets 3 "
    "points. If both defect, each gets 1 point. If one cooperates and the other defects, the one "
    "who cooperates gets 0 points and the one who defects gets 5. Before you choose, you talk."
)
PREDICT = "The talk is over. Will {} cooperate or defect? Answer with one word."
DECIDE = "The talk is over. Do you cooperate or defect? Answer with one word."
PAYOFFS = {
    ("cooperate", "cooperate"): (3, 3),
    ("cooperate", "defect"): (0, 5),
    ("defect", "cooperate"): (5, 0),
    ("defect", "defect"): (1, 1),
}


@dataclass
class _Agent:
    """One player: what it alone may read, and the talk as it hears it."""

    name: str
    system: Message
    plan: Message
    talk: list[Message] = field(default_factory=list)

    def read(self, rules: Message) -> list[Message]:
        """All that it may read, in order."""
        return [self.system, rules, self.plan, *self.talk]


def prisoners_dilemma(
    c: Facade,
    *,
    strategies: Sequence[str] = ("none", "none"),
    leak: str = "both",
    rounds: int = 2,
    first: str = NAMES[0],
    predict: bool = False,
    plans: Sequence[Sequence[int]] | None = None,
    sampling_params: Sampling = None,
    decision_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Play one game; see `vllm_choreo.lab.workflows`.

    The answers are both decisions, Alice's before Bob's: "cooperate", "defect" or "undecided", for
    `payoffs`; and then Bob's prediction, if he is asked for one. In mode "baseline" nothing leaks,
    for text carries nothing but itself.

    Args:
        strategies: each agent's own, given by its system prompt: "none", "always cooperate" or
            "always defect".
        leak: context that an utterance carries: "both", "system", "plan" or "none".
        rounds: how often each agent speaks.
        first: who speaks first, "Alice" or "Bob".
        predict: Bob says what Alice will do before he decides.
        plans: token ids of Alice's plan and of Bob's, see `plans_of`; None: they are made.
        decision_params: sampling parameters of the decisions; None: `sampling_params`.

    Raises:
        ChoreoError: no such strategy, leak or player, or other than two plans.
    """
    _check(strategies, leak, first, plans)
    inputs: dict[str, Any] = {"strategies": list(strategies), "leak": leak, "rounds": rounds}
    inputs |= {"first": first, "predict": predict}
    if plans is not None:
        inputs["plans"] = [list(plan) for plan in plans]
    inputs |= {"sampling_params": sampling_params, "decision_params": decision_params}
    c, chat, log = open_chat("prisoners_dilemma", c, inputs, turns, on_step)
    rules = log.add("rules", "rules", c.prefill(chat.user(RULES), role="rules"))
    agents = _agents(c, chat, log, rules, strategies, plans, sampling_params)

    public: list[Message] = []  # the talk as the other one hears it
    order = agents if first == NAMES[0] else agents[::-1]
    for number in range(1, rounds + 1):
        for agent, other in (order, order[::-1]):
            said = _speak(c, chat, log, f"round {number}", agent, rules, sampling_params)
            public.append(_as_heard(c, log, leak, agent, said, [rules, *public]))
            agent.talk.append(said)
            other.talk.append(public[-1])
    params = decision_params or sampling_params
    predicted = [_prediction(c, chat, log, rules, agents, params)] if predict else []
    return log.finish([*_decisions(c, chat, log, rules, agents, params), *predicted])


def plans_of(transcript: Transcript) -> list[list[int]]:
    """Token ids of both plans of a game, for another one with the same plans."""
    return [list(s.message.token_ids) for s in transcript.steps if s.stage == "plans"]


def _check(
    strategies: Sequence[str], leak: str, first: str, plans: Sequence[Sequence[int]] | None
) -> None:
    if leak not in LEAKS:
        raise ChoreoError(f"leak must be one of {LEAKS}", parameter="leak", value=leak)
    if first not in NAMES:
        raise ChoreoError(f"first must be one of {NAMES}", parameter="first", value=first)
    if plans is not None and len(plans) != len(NAMES):
        raise ChoreoError("plans must be two", parameter="plans", value=len(plans))
    if len(strategies) != 2 or not set(strategies) <= set(STRATEGIES):
        raise ChoreoError(
            f"strategies must be two of {tuple(STRATEGIES)}",
            parameter="strategies",
            value=strategies,
        )


def _agents(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    rules: Message,
    strategies: Sequence[str],
    plans: Sequence[Sequence[int]] | None,
    sampling_params: Sampling,
) -> list[_Agent]:
    """Both players with their plans."""
    texts = [
        chat.system(SYSTEM.format(name, other, STRATEGIES[strategy]))
        for name, other, strategy in zip(NAMES, NAMES[::-1], strategies, strict=True)
    ]
    prompts = log.add_all(
        "rules", NAMES, c.prefill([{"tokens": text} for text in texts], role="system")
    )
    calls: list[dict[str, Any]] = [{"parents": [prompt, rules]} for prompt in prompts]
    if plans is not None:
        for call, plan in zip(calls, plans, strict=True):
            call["tokens"] = list(plan)
        made = c.prefill(calls, role="plan")
    else:
        for number, call in enumerate(calls):
            call["header"] = chat.assistant("My secret plan:")
            call["sampling_params"] = seeded(sampling_params, number)
        made = c.decode(calls, role="plan")
    own = log.add_all("plans", NAMES, made)
    return [_Agent(*each) for each in zip(NAMES, prompts, own, strict=True)]


def _speak(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    stage: str,
    agent: _Agent,
    rules: Message,
    sampling_params: Sampling,
) -> Message:
    said = c.decode(
        chat.assistant(f"{agent.name}:"),
        parents=agent.read(rules),
        role="utterance",
        sampling_params=seeded(sampling_params, len(log.steps)),
    )
    return log.add(stage, agent.name, said)


def _as_heard(
    c: Facade, log: Transcript, leak: str, speaker: _Agent, said: Message, public: Sequence[Message]
) -> Message:
    """The utterance with the context that it may carry; encoded again unless that is all."""
    if leak == "both":
        return said
    carried: dict[str, list[Message]] = {
        "system": [speaker.system],
        "plan": [speaker.plan],
        "none": [],
    }
    utterance = c.prefill(said.token_ids, parents=[*carried[leak], *public], role="utterance")
    return log.add("as heard", speaker.name, utterance)


def _prediction(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    rules: Message,
    agents: Sequence[_Agent],
    sampling_params: Sampling,
) -> str:
    """Bob's prediction of what Alice will do, which he reads when he decides."""
    other, agent = agents
    said = c.decode(
        chat.user(PREDICT.format(other.name)) + chat.assistant(f"{other.name} will"),
        parents=agent.read(rules),
        role="prediction",
        sampling_params=seeded(sampling_params, len(log.steps)),
    )
    agent.talk.append(log.add("prediction", agent.name, said))
    return decision(said.generated_text)


def _decisions(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    rules: Message,
    agents: Sequence[_Agent],
    sampling_params: Sampling,
) -> list[str]:
    calls = [
        {
            "header": chat.user(DECIDE) + chat.assistant("I"),
            "parents": agent.read(rules),
            "sampling_params": seeded(sampling_params, len(log.steps) + number),
        }
        for number, agent in enumerate(agents)
    ]
    messages = log.add_all("decisions", NAMES, c.decode(calls, role="decision"))
    return [decision(message.generated_text) for message in messages]


def decision(text: str) -> str:
    """The first choice that a text names: "cooperate", "defect", or "undecided" if none.

    A choice that is denied ("will not defect", "won't cooperate") is the other one.
    """
    found = re.search(r"(\bnot\s+|n['’]t\s+|\bnever\s+)?\b(cooperat|defect)", text.lower())
    if found is None:
        return "undecided"
    cooperates = (found[2] == "cooperat") == (found[1] is None)
    return "cooperate" if cooperates else "defect"


def payoffs(first: str, second: str) -> tuple[int, int] | None:
    """Points that each player gets; None if one of them is undecided."""
    return PAYOFFS.get((first, second))
