# SPDX-License-Identifier: Apache-2.0
"""The calls of a batch as text, for whoever decides when each is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_choreo.planner import CompiledGraph
from vllm_choreo.planner.logical.nodes import Node
from vllm_choreo.planner.logical.values import CHATML, evaluate, prompt_text
from vllm_choreo.planner.workers.worker import Answer

WIDTH = 32  # calls at a time


class Answers(Protocol):
    """What rivals ask of a worker."""

    async def decode(
        self, header: str, parents: Sequence[Any], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer: ...


@dataclass
class Text:
    """Calls as text on an engine.

    Attributes:
        answers: of all calls.
    """

    worker: Answers
    compiled: CompiledGraph
    answers: list[Answer] = field(default_factory=list)

    def prompt(self, number: int, inputs: Sequence[Any]) -> str:
        """What an `llm` operator says."""
        return prompt_text(self.compiled.graph.nodes[number], inputs, CHATML)

    async def value(self, number: int, inputs: Sequence[Any]) -> Any:
        """Of an operator that is no placeholder, and has these inputs."""
        node: Node = self.compiled.graph.nodes[number]
        if node.kind != "llm":
            return evaluate(node, inputs)
        prompt = self.prompt(number, inputs)
        answer = await self.worker.decode(prompt, (), True, node.attrs["sampling"])
        self.answers.append(answer)
        return answer.text

    def given(self) -> list[dict[int, Any]]:
        """Of each query, the values of operators that are given, by number."""
        return [
            {number: values[query] for number, values in self.compiled.inputs.items()}
            for query in range(self.compiled.batch_size)
        ]
