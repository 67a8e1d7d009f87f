# SPDX-License-Identifier: Apache-2.0
"""One recorded run, replayed: what its calls say, against what they say as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.calibrate.repaired import Choose, Repaired, RepairedCall
from vllm_choreo.lab.study.divergence import kl_per_token
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT, Judged
from vllm_choreo.semantics.session_options import RepairGiven

if TYPE_CHECKING:
    from vllm import LLM

# Of policies: tokens of a block, and how many blocks a message has; the last one is all the rest.
BLOCK, NUM_BLOCKS = 16, 16


@dataclass(frozen=True)
class MeasuredReplay:
    """Measures of one replay.

    Attributes:
        calls: calls that generate, in order.
        kl: KL(text || this) of each call in nats, summed over its tokens.
        same: number of each call's tokens at which the likeliest one is the text's.
        num_encoded: tokens that all calls encoded before they generated any.
        num_reused: tokens that all calls read; of those that read the same, once.
        ttft: seconds to the first token, the mean of calls that generate.
        read: all calls that have parents.
    """

    calls: tuple[RepairedCall, ...]
    kl: tuple[float, ...]
    same: tuple[int, ...]
    num_encoded: int
    num_reused: int
    ttft: float
    read: tuple[RepairedCall, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(len(call.message.generated_token_ids) for call in self.calls)

    @property
    def judged(self) -> Judged:
        """Judgement of the replay, which has no answers of its own."""
        num_encoded, kl = self.num_encoded, sum(self.kl)
        return Judged((), None, kl, self.num_tokens, num_encoded=num_encoded, ttft=self.ttft)


def distinct(calls: Sequence[RepairedCall]) -> list[RepairedCall]:
    """First of the calls of each role that read the same: what one repairs, the others share."""
    first: dict[object, RepairedCall] = {}
    for call in calls:
        first.setdefault((call.role, call.message.parents), call)
    return list(first.values())


class Replays:
    """The replays of one run on an engine.

    Args:
        llm: engine in this process, which forces tokens.
        task: task with its recorded run.
    """

    def __init__(self, llm: LLM, task: Task) -> None:
        self._llm, self._task = llm, task
        self._text, _ = self._replay(Arm(TEXT, "baseline"), None)

    def measure(self, repair: RepairGiven = None, choose: Choose | None = None) -> MeasuredReplay:
        """Replay choreographed, with a session's rule, or with blocks chosen call by call."""
        said, calls = self._replay(Arm(CHOREOGRAPHED, "choreo", repair=repair), choose)
        decodes = tuple(call for call in calls if call.message.generated_token_ids)
        pairs = list(zip(self._text, said, strict=True))
        messages = [call.message for call in calls]
        return MeasuredReplay(
            calls=decodes,
            kl=tuple(float(kl_per_token(*pair).sum()) for pair in pairs),
            same=tuple(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in pairs),
            num_encoded=sum(message.num_prefilled for message in messages),
            num_reused=sum(
                parent.num_tokens for call in distinct(calls) for parent in call.parents
            ),
            ttft=fmean(call.message.metrics.ttft for call in decodes),
            read=tuple(call for call in calls if call.parents),
        )

    def _replay(
        self, arm: Arm, choose: Choose | None
    ) -> tuple[Sequence[np.ndarray], list[RepairedCall]]:
        recorded = self._task.recorded
        assert recorded is not None
        with arm.open(self._llm) as c:
            chosen = Repaired(c, choose, BLOCK, NUM_BLOCKS)
            _, said = arm.replayed(chosen, recorded.workflow, self._task, recorded)
        return said, chosen.calls
