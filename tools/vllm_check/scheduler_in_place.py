# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: tests that import vLLM's schedulers get ours."""

from __future__ import annotations

import vllm.v1.core.sched.async_scheduler as asynchronous
import vllm.v1.core.sched.scheduler as synchronous

from vllm_choreo.engine.scheduler.scheduler import ChoreoAsyncScheduler, ChoreoScheduler

synchronous.Scheduler = ChoreoScheduler
asynchronous.AsyncScheduler = ChoreoAsyncScheduler
