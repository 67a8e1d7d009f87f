# SPDX-License-Identifier: Apache-2.0
"""What the calls of a workflow should take, by the measured times of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.stats import median
from vllm_choreo.transcript.transcript import Step, Transcript


class CostModel:
    """What calls should take that run in parallel: one step over all tokens that they prefill.

    Args:
        steps: measured seconds to first token by the length of a header, with nothing to reuse.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]]) -> None:
        times: dict[int, list[float]] = {}
        for step in steps:
            times.setdefault(int(step["header_tokens"]), []).append(float(step["ttft_s"]))
        self._points = [(length, median(times[length])) for length in sorted(times)]

    def step_seconds(self, num_tokens: int) -> float:
        """Of 1 token or more: between the lengths in proportion, beyond at the last one's rate."""
        longest, seconds = self._points[-1]
        if num_tokens >= longest:
            return seconds * num_tokens / longest
        n1, t1 = next(point for point in self._points if point[0] > num_tokens)
        n0, t0 = max(point for point in self._points if point[0] <= num_tokens)
        return t0 + (t1 - t0) * (num_tokens - n0) / (n1 - n0)

    def first_tokens(self, run: Transcript) -> list[float]:
        """Expected seconds to first token of every call that generates."""
        return [
            seconds
            for steps, seconds in self._batches(run)
            for step in steps
            if step.message.generated_token_ids
        ]

    def prefill_seconds(self, run: Transcript) -> float:
        """Expected seconds of all prefilling of a run."""
        return sum(seconds for _, seconds in self._batches(run))

    def _batches(self, run: Transcript) -> list[tuple[list[Step], float]]:
        """The calls that were submitted together, and how long they should prefill."""
        batches: dict[float, list[Step]] = {}
        for step in run.steps:
            batches.setdefault(step.message.metrics.submitted, []).append(step)
        unread: set[str] = set()
        found = []
        for steps in batches.values():
            num_tokens = sum(step.message.num_prefilled for step in steps)
            if run.mode == "choreo":
                # The last token of an answer is run when the answer is first read.
                num_tokens += len(unread)
                unread = {s.message.id for s in steps if s.message.generated_token_ids}
            found.append((steps, self.step_seconds(num_tokens) if num_tokens else 0.0))
        return found
