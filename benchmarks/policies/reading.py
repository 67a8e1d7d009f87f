# SPDX-License-Identifier: Apache-2.0
"""One message on one engine, read under both policies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.checks import logprobs_of, require_alike
from benchmarks.harness.engine import draw_tokens, forced, only_token, runner_of, scheduler_of
from benchmarks.harness.stats import median
from benchmarks.harness.steps import StepWatch, used_blocks
from benchmarks.policies.patterns import POLICIES, Pattern

MESSAGE_TOKENS = 4000  # whole blocks: unpadded, so that its own place is a distance of 0
ANSWER_TOKENS = 8


class Reading:
    """The engine, its two policies, and the message that is read."""

    def __init__(self, llm: Any) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.c = Choreography(llm)
        self._mover = scheduler_of(llm).mover
        self.message = self.c.prefill(draw_tokens(0, MESSAGE_TOKENS))

    def _switch(self, policy: str) -> None:
        """What `ChoreoConfig.reposition` decides when an engine starts; between calls."""
        scheduler = scheduler_of(self.llm)
        mover = self._mover if policy == "in_place" else None
        scheduler.mover = scheduler.kv_cache_manager.mover = mover

    def call(self, policy: str, distances: Sequence[int], **options: Any) -> dict[str, Any]:
        """One reader per distance, in parallel; what it took and moved."""
        self._switch(policy)
        calls = [
            {
                "header": list(range(500, 508)),
                "parents": [self.message],
                "new_offset": MESSAGE_TOKENS + distance,
            }
            for distance in distances
        ]
        params = forced(self.llm, ANSWER_TOKENS, **options)
        before = used_blocks(scheduler_of(self.llm))
        with StepWatch(self.llm) as watch, _moves(self.llm) as moves:
            answers = self.c.decode(calls, sampling_params=params)
        self.c.free(*answers)
        return {
            "ttft_s": round(median(answer.metrics.ttft for answer in answers), 6),
            "steps": watch.decode_seconds(len(distances)),
            "blocks": watch.peak_blocks() - before,
            **moves,
            "logprobs": [answer.logprobs for answer in answers],
        }

    def go_home(self) -> None:
        """Let the message lie where it was encoded, wherever it was moved to."""
        self.call("in_place", (0,))

    def check(self, pattern: Pattern) -> None:
        """Both policies must say the same."""
        found = []
        for policy in POLICIES:
            self.go_home()
            calls = [self.call(policy, d, logprobs=1)["logprobs"] for d in pattern.distances]
            steps = itertools.chain(*itertools.chain(*calls))
            found.append(logprobs_of(steps, only_token(self.llm)))
        require_alike(pattern.name, *found)


@contextmanager
def _moves(llm: Any) -> Iterator[dict[str, Any]]:
    """Counts blocks whose keys are moved, in place and into copies, and the seconds it takes."""
    runner = runner_of(llm)
    move_keys = runner._move_keys
    found = {"in_place_blocks": 0, "copied_blocks": 0, "move_s": 0.0}

    def watched(moves: Any) -> None:
        start = time.perf_counter()
        move_keys(moves)
        found["move_s"] = round(found["move_s"] + time.perf_counter() - start, 6)
        found["in_place_blocks"] += sum(move.src == move.dst for move in moves)
        found["copied_blocks"] += sum(move.src != move.dst for move in moves)

    runner._move_keys = watched
    try:
        yield found
    finally:
        del runner._move_keys
