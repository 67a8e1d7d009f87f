# SPDX-License-Identifier: Apache-2.0
"""Where the time to first token goes: timers around the parts of an engine in this process.

Time is counted once: a part's time does not hold that of the parts that it calls.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Clock:
    """Exclusive time per part, while it is open.

    Attributes:
        seconds: of each part since `open`.
        steps: per model step since `open`: scheduled tokens, requests.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps: list[tuple[int, int]] = []
        self._running: list[str] = []
        self._since = 0.0
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Start at zero."""
        self.seconds.clear()
        self.steps.clear()
        self._since = time.perf_counter()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time in `owner.name` as `part`."""
        inner = getattr(owner, name)
        had_own = name in vars(owner)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        setattr(owner, name, timed)
        self._undo.append(
            (lambda: setattr(owner, name, inner)) if had_own else (lambda: delattr(owner, name))
        )

    def _switch(self) -> None:
        now = time.perf_counter()
        part = self._running[-1] if self._running else "client"
        self.seconds[part] += now - self._since
        self._since = now

    def close(self) -> dict[str, float]:
        """Milliseconds per part since `open`."""
        self._switch()
        return {part: 1e3 * seconds for part, seconds in self.seconds.items()}

    def remove(self) -> None:
        """Take the timers out again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def install(clock: Clock, llm: Any) -> None:
    """Put the clock's timers around the parts of an engine with the plugin."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_choreo.engine.worker import attention

    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    parts = [
        (engine, "add_request", "add request"),
        (engine, "step", "engine step (vLLM)"),
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update_from_output", "update from output"),
        (runner, "execute_model", "prepare the batch (vLLM)"),
        (runner.batcher, "batch", "lay out spans"),
        (runner, "_model_forward", "linear layers"),
        (runner.model, "compute_logits", "lm_head"),
        (runner, "sample_tokens", "sample"),
        (attention, "span_attention", "attention"),
        (CPUAttentionBackendImpl, "forward", "attention"),
        (CPUAttentionBackendImpl, "do_kv_cache_update", "store keys and values"),
    ]
    for owner, name, part in parts:
        clock.wrap(owner, name, part)
    _record_steps(clock, core.scheduler)


def _record_steps(clock: Clock, scheduler: Any) -> None:
    timed = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = timed(*args, **kwargs)
        clock.steps.append((output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)))
        return output

    scheduler.schedule = schedule
