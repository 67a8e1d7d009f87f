# SPDX-License-Identifier: Apache-2.0
"""Function calls: a coder calls functions for a user, a tester looks, a reviewer calls the rest.

The roles of Ye et al., "KVCOMM" (2025), at the requests of BFCL, which a user makes one after the
other. All read the functions and what was asked, called, returned and said before, each behind a
role of its own. As text no two roles share a beginning; choreographed, all of it is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.problems.function_calls import SimulatedFunctions, calls_in
from vllm_choreo.lab.workflows.agent_role import AgentRole
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

_FORM = 'Write them as a list in Python, such as [f(a=1), g(b="x")], and nothing else.'
ROLES = {
    "coder": AgentRole(
        f"You call functions to do what a user asks. {_FORM}",
        "calls",
        "Call what the last request needs.",
        "[",
    ),
    "tester": AgentRole(
        "You check calls of functions. You say in one sentence what is missing.",
        "remark",
        "Is the last request met? What is missing?",
        "",
    ),
    "reviewer": AgentRole(
        f"You call functions that others forgot, [] if there are none. {_FORM}",
        "rest",
        "Call what is still missing.",
        "[",
    ),
}


def function_calls(
    c: Facade,
    requests: Sequence[str],
    scenario: dict[str, Any],
    *,
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Meet requests by calling functions; see `vllm_choreo.lab.workflows`.

    The answer is what was called, as JSON: for each request a list of the calls of each role.

    Args:
        requests: texts of the user, turn by turn.
        scenario: functions, and the state they begin with; see `SimulatedFunctions`.

    Raises:
        ChoreoError: see `SimulatedFunctions`.
    """
    functions = SimulatedFunctions(scenario)
    inputs: dict[str, Any] = {"requests": list(requests), "scenario": scenario}
    inputs |= {"sampling_params": sampling_params}
    c, chat, log = open_chat("function_calls", c, inputs, turns, on_step)
    texts = {"functions": chat.user(f"Functions:\n{functions.text}")}
    texts |= {name: chat.system(role.system) for name, role in ROLES.items()}
    messages = c.prefill([{"tokens": text, "role": name} for name, text in texts.items()])
    listed, *prompts = log.add_all("task", list(texts), messages)
    context: list[Message] = [listed]

    def add(stage: str, author: str, text: str) -> None:
        """Have all that follow read a text."""
        context.append(log.add(stage, author, c.prefill(chat.user(text), role=author)))

    made: list[list[list[str]]] = []
    for number, request in enumerate(requests, start=1):
        add(f"request {number}", "request", request)
        made.append([])
        for (name, role), prompt in zip(ROLES.items(), prompts, strict=True):
            params = seeded(sampling_params, len(log.steps))
            answer = role.say(c, chat, [prompt, *context], params)
            context.append(log.add(f"{role.says} {number}", name, answer))
            calls = calls_in(role.opening + answer.generated_text) if role.opening else []
            if calls:
                made[-1].append(calls)
                results = "\n".join(f"{call}: {functions.run(call)}" for call in calls)
                add(f"results {number}", "results", results)
    return log.finish([json.dumps(made)])
