# SPDX-License-Identifier: Apache-2.0
"""Direct: one call, an ordinary request. The control of the other workflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_choreo.api.protocol import Facade
from vllm_choreo.workflows.chat import assistant, user
from vllm_choreo.workflows.record.transcript import Step, Transcript


def direct(
    c: Facade,
    question: str,
    *,
    sampling_params: Any = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask `question` once; see `vllm_choreo.workflows`."""
    inputs = {"question": question, "sampling_params": sampling_params}
    log = Transcript("direct", c.mode, inputs, on_step)
    answer = c.decode(user(question) + assistant(), sampling_params=sampling_params)
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])
