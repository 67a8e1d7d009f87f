# SPDX-License-Identifier: Apache-2.0
"""What a workflow did: its calls in order, with messages, parents and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_choreo.message import Message


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        stage: the part of the workflow, for example "round 2"; its calls ran in parallel.
        author: who wrote the message, for example "agent 1".
        message: with its parents, usage and times.
    """

    stage: str
    author: str
    message: Message


@dataclass
class Transcript:
    """The calls of one run of a workflow.

    Attributes:
        workflow: its name.
        mode: of the `Choreography` that it ran on.
        on_step: called with each step when it is done.
        steps: in the order of their submission.
        answers: what the workflow came to.
        seconds: wall clock from the first call to the answers.
    """

    workflow: str
    mode: str
    on_step: Callable[[Step], None] | None = None
    steps: list[Step] = field(default_factory=list)
    answers: tuple[str, ...] = ()
    seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    def add(self, stage: str, author: str, message: Message) -> Message:
        """Record one call and pass its message on."""
        step = Step(stage, author, message)
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)
        return message

    def add_all(
        self, stage: str, authors: Sequence[str], messages: Sequence[Message]
    ) -> list[Message]:
        """Record the calls of a parallel list."""
        for author, message in zip(authors, messages, strict=True):
            self.add(stage, author, message)
        return list(messages)

    def finish(self, answers: Sequence[str]) -> Transcript:
        """Record the outcome and stop the clock."""
        self.answers = tuple(answers)
        self.seconds = time.perf_counter() - self._start
        return self

    def stages(self) -> list[str]:
        """The stages in order."""
        return list(dict.fromkeys(step.stage for step in self.steps))

    def decodes(self) -> list[Step]:
        """The steps that generated text."""
        return [step for step in self.steps if step.message.generated_token_ids]
