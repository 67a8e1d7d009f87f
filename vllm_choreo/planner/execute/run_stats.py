# SPDX-License-Identifier: Apache-2.0
"""Statistics of a run: its calls, by worker and time, and sums over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_choreo.planner.workers.worker import Answer


@dataclass
class Lane:
    """A call that was run: its worker, its times in seconds from the run's start, its tries."""

    task: int
    worker: int
    begin: float
    end: float
    answer: Answer
    tries: int = 1


@dataclass
class RunStats:
    """Counts, tokens and seconds of a run.

    Attributes:
        num_calls: calls that workers have answered.
        num_joined: calls that took the answer of an equal one.
        num_fetched: calls whose answers the answer cache had.
        num_retries: calls that were made again.
        num_shared: messages that calls shared.
        num_moved: answers that went to another worker as keys and values.
        num_prompt, num_reused, num_out: tokens of prompts, tokens of prompts that were not encoded
            for the call, and tokens generated.
        num_encoded: tokens of prompts, and of messages for them, that were encoded in this run.
        seconds: time from the start of the run until its messages are freed.
        lanes: the calls.
    """

    num_calls: int = 0
    num_joined: int = 0
    num_fetched: int = 0
    num_retries: int = 0
    num_shared: int = 0
    num_moved: int = 0
    num_prompt: int = 0
    num_reused: int = 0
    num_out: int = 0
    num_encoded: int = 0
    seconds: float = 0.0
    lanes: list[Lane] = field(default_factory=list)
