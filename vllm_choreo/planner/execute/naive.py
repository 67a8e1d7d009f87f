# SPDX-License-Identifier: Apache-2.0
"""Naive run: query by query, operator by operator, every prompt as one text.

It defines what a graph means: `semantics="exact"` gives these answers. It shares nothing with
planning but the language.
"""

from __future__ import annotations

import asyncio

from vllm_choreo.planner.logical.nodes import BoundGraph, Value
from vllm_choreo.planner.logical.values import (
    CHATML,
    Functions,
    Template,
    chosen_case,
    evaluate,
    prompt_text,
)
from vllm_choreo.planner.workers.facade import AnyFacade, as_worker
from vllm_choreo.planner.workers.worker import Worker


def naive(
    compiled: BoundGraph, facade: AnyFacade | Worker, *, template: Template = CHATML
) -> list[Value]:
    """Run a batch; return each query's value, or with several results a dict of them by name.

    Raises:
        GraphError, ChoreoError: what an operator raises ends the run.
    """
    return asyncio.run(_naive(compiled, as_worker(facade), template))


async def _naive(compiled: BoundGraph, worker: Worker, template: Template) -> list[Value]:
    results = []
    for query in range(compiled.batch_size):
        run = _Query(compiled, query, worker, template)
        values = {name: await run.value(n) for name, n in compiled.graph.outputs.items()}
        results.append(values if len(values) > 1 else next(iter(values.values())))
    return results


class _Query:
    """One query: the values of its operators, each computed when it is asked for."""

    def __init__(
        self, compiled: BoundGraph, query: int, worker: Worker, template: Template
    ) -> None:
        self._compiled, self._query = compiled, query
        self._worker, self._template = worker, template
        self._functions = Functions()
        self._values: dict[int, Value] = {}

    async def value(self, wanted: int) -> Value:
        stack = [wanted]  # no recursion: chains of operators may be long
        while stack:
            number = stack[-1]
            missing = [given for given in self._reads(number) if given not in self._values]
            if missing:
                stack += missing
                continue
            stack.pop()
            if number not in self._values:
                self._values[number] = await self._compute(number)
        return self._values[wanted]

    def _reads(self, number: int) -> tuple[int, ...]:
        """Nodes that an operator reads; of a switch, its key and, once known, the chosen case."""
        node = self._compiled.graph.nodes[number]
        if node.kind != "switch":
            return node.inputs
        key = node.inputs[0]
        if key not in self._values:
            return (key,)
        return key, node.inputs[chosen_case(node, self._values[key])]

    async def _compute(self, number: int) -> Value:
        node = self._compiled.graph.nodes[number]
        if number in self._compiled.inputs:
            return self._compiled.inputs[number][self._query]
        if node.kind == "switch":
            return self._values[self._reads(number)[1]]
        inputs = [self._values[given] for given in node.inputs]
        if node.kind == "fn":
            return self._functions.call(node, inputs)
        if node.kind != "llm":
            return evaluate(node, inputs)
        prompt = prompt_text(node, inputs, self._template)
        answer = await self._worker.decode(prompt, (), True, node.attrs["sampling"])
        return answer.text
