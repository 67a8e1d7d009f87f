# SPDX-License-Identifier: Apache-2.0
"""Transcripts of workflows: calls in order, with messages, parents and times; also as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.check import check_transcript
from vllm_choreo.wire.messages import message_of, record_json

FORMAT = 1  # of the JSON form


@dataclass(frozen=True)
class Step:
    """One call of a workflow.

    Attributes:
        stage: the part of the workflow, for example "round 2"; its calls ran in parallel.
        author: who wrote the message, for example "agent 1".
        message: its message, with parents, usage and times.
    """

    stage: str
    author: str
    message: Message


@dataclass
class Transcript:
    """The calls of one run of a workflow.

    Attributes:
        workflow: the name of its function.
        mode: mode of the `Choreography` that it ran on.
        inputs: the arguments of the function by name, without `c` and `on_step`.
        on_step: called with each step when it is done.
        steps: calls in the order of their submission.
        answers: outcome of the workflow.
        seconds: wall clock from the first call to the answers.
        start: start of that clock, `time.perf_counter`; 0 in a transcript that was loaded.
    """

    workflow: str
    mode: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    on_step: Callable[[Step], None] | None = None
    steps: list[Step] = field(default_factory=list)
    answers: tuple[str, ...] = ()
    seconds: float = 0.0
    start: float = field(default_factory=time.perf_counter)

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
        self.seconds = time.perf_counter() - self.start
        return self

    @property
    def title(self) -> str:
        """The workflow's name in words."""
        return self.workflow.replace("_", " ")

    def stages(self) -> list[str]:
        """The stages in order."""
        return list(dict.fromkeys(step.stage for step in self.steps))

    def decodes(self) -> list[Step]:
        """The steps that generated text."""
        return [step for step in self.steps if step.message.generated_token_ids]

    # -- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data: all but logprobs. Times in seconds, those of submission since `start`."""
        return {
            "format": FORMAT,
            "workflow": self.workflow,
            "mode": self.mode,
            "seconds": self.seconds,
            "answers": list(self.answers),
            "inputs": {name: _plain(value) for name, value in self.inputs.items()},
            "steps": [_step_to_json(step, self.start) for step in self.steps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transcript:
        """Read the data of `to_json`; the messages are records, no engine knows them.

        Raises:
            ValueError: the data are of another format, or not as `to_json` writes them; names
                the place.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"a transcript of format {FORMAT} is needed, not {found}")
        check_transcript(data)
        return cls(
            workflow=data["workflow"],
            mode=data["mode"],
            inputs=data["inputs"],
            steps=[_step_from_json(step) for step in data["steps"]],
            answers=tuple(data["answers"]),
            seconds=data["seconds"],
            start=0.0,
        )

    def save(self, path: Path) -> None:
        """Write the JSON form to a file."""
        path.write_text(json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Transcript:
        """Read the file of `save`."""
        return cls.from_json(json.loads(path.read_text("utf-8")))


def _plain(value: object) -> object:
    """An argument as plain data: `SamplingParams(**plain)` makes sampling parameters again."""
    if hasattr(value, "__struct_fields__"):
        import msgspec

        return msgspec.to_builtins(value)
    return list(value) if isinstance(value, tuple) else value


def _step_to_json(step: Step, start: float) -> dict[str, Any]:
    message, record = step.message, record_json(step.message)
    return {
        "stage": step.stage,
        "author": step.author,
        "kind": "decode" if message.generated_token_ids else "prefill",
        **record,
        "parents": [list(span) for span in message.parents],
        "metrics": {**record["metrics"], "submitted": message.metrics.submitted - start},
    }


def _step_from_json(data: Mapping[str, Any]) -> Step:
    message = message_of(data, data["metrics"]["submitted"])
    return Step(data["stage"], data["author"], message)
