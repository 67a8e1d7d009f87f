# SPDX-License-Identifier: Apache-2.0
"""Output of a step that also tells the scheduler the attention of calls that looked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_choreo.engine.step import tell_attention


class AsyncTold(AsyncModelRunnerOutput):
    """Asynchronous output of a step, with the attention that parents' tokens got added."""

    def __init__(
        self, output: AsyncModelRunnerOutput, attention: Mapping[str, Sequence[Sequence[float]]]
    ) -> None:
        self._output = output
        self._attention = attention

    def get_output(self) -> ModelRunnerOutput:
        told: ModelRunnerOutput = tell_attention(self._output.get_output(), self._attention)
        return told
