# SPDX-License-Identifier: Apache-2.0
"""Output of a step with the attention of calls that looked, for the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_choreo.engine.step import with_attention


class AsyncAttentionOutput(AsyncModelRunnerOutput):
    """Asynchronous output of a step, with the attention that parents' tokens got added."""

    def __init__(
        self, output: AsyncModelRunnerOutput, attention: Mapping[str, Sequence[Sequence[float]]]
    ) -> None:
        self._output = output
        self._attention = attention

    def get_output(self) -> ModelRunnerOutput:
        return with_attention(self._output.get_output(), self._attention)
