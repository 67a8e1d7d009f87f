# SPDX-License-Identifier: Apache-2.0
"""Code review: a coder writes a function, a tester tests for it, a reviewer the final version.

The roles are those in which Ye et al., "KVCOMM: Online Cross-context KV-cache Communication for
Efficient LLM-based Multi-agent Systems" (2025), have agents program, in short: each reads the task
and all that was said before it, behind a role of its own. As text no two of their prompts share a
beginning; choreographed, the task and what was said are encoded once.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.workflows.agent_role import AgentRole
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

ROLES = {
    "coder": AgentRole(
        "You are a programmer. You write correct and simple functions in Python.",
        "code",
        "Write the whole function.",
        "```python\n",
    ),
    "tester": AgentRole(
        "You are a tester. You write short tests that find what is wrong with a function.",
        "tests",
        "Write at most five asserts for this function.",
        "```python\nassert",
    ),
    "reviewer": AgentRole(
        "You are a reviewer. You read code and its tests, and mend what is wrong.",
        "answer",
        "Write the final version of the whole function: as it is if it is right.",
        "```python\n",
    ),
}


def code_review(
    c: Facade,
    question: str,
    *,
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Write a function in three roles; see `vllm_choreo.lab.workflows`. The answer is the last one.

    Args:
        question: description of the function.
    """
    inputs = {"question": question, "sampling_params": sampling_params}
    c, chat, log = open_chat("code_review", c, inputs, turns, on_step)
    texts = {"question": chat.user(question)}
    texts |= {name: chat.system(role.system) for name, role in ROLES.items()}
    messages = c.prefill([{"tokens": text, "role": name} for name, text in texts.items()])
    task, *prompts = log.add_all("task", list(texts), messages)
    said: list[Message] = []
    speakers = zip(ROLES.items(), prompts, strict=True)
    for number, ((name, role), prompt) in enumerate(speakers, start=1):
        answer = role.say(c, chat, [prompt, task, *said], seeded(sampling_params, number))
        said.append(log.add(role.says, name, answer))
    return log.finish([said[-1].generated_text])
