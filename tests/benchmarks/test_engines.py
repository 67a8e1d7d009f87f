# SPDX-License-Identifier: Apache-2.0
"""What benchmarks take hold of inside the engine is there."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from benchmarks.attention.shared_work import planning_times
from benchmarks.harness.engine import (
    kv_block_bytes,
    runner_of,
    scheduler_of,
    set_shared_reading,
)
from benchmarks.harness.steps import StepWatch
from benchmarks.ttft import breakdown
from vllm_choreo import Choreography


def test_the_time_to_first_token_has_parts(plain_llama: Any) -> None:
    llm = plain_llama
    clock = breakdown.Clock()
    with Choreography(llm) as c:
        doc = c.prefill(list(range(5, 45)))
        breakdown.install(clock, llm)
        try:
            clock.open()
            c.decode([7], parents=[doc], sampling_params=SamplingParams(max_tokens=1))
            parts = clock.close()
        finally:
            clock.remove()
    for part in ("schedule", "lay out spans", "attention", "store keys and values", "sample"):
        assert parts[part] > 0.0, part
    assert clock.steps[0] == (1, 1)  # tokens and requests of the first step


def test_the_planning_of_a_batch_is_timed() -> None:
    times = planning_times(3)
    assert 0.0 < times["kept"] < times["new"]


def test_what_benchmarks_switch_and_watch_is_there(plain_llama: Any) -> None:
    llm = plain_llama
    set_shared_reading(llm, False)
    set_shared_reading(llm, True)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Choreography(llm) as c:
        doc = c.prefill(list(range(5, 45)))
        with StepWatch(llm) as watch:
            c.decode([7], parents=[doc], sampling_params=params)
        assert len(watch.decode_seconds(1)) >= 2
        assert watch.peak_blocks() > 0 and kv_block_bytes(llm) > 0
        scheduler = scheduler_of(llm)
        assert any(m.id == doc.id for m in scheduler.store.messages(c.session))
    # What moves keys, which the policies switch and count.
    assert hasattr(scheduler, "mover") and hasattr(scheduler.kv_cache_manager, "mover")
    assert callable(runner_of(llm)._move_keys)
