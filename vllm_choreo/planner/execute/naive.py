# SPDX-License-Identifier: Apache-2.0
"""Naive run: query by query, operator by operator, every prompt as one text.

It defines what a graph means: `semantics="exact"` gives these answers. It shares nothing with
planning but the language.
"""

from __future__ import annotations

import asyncio

from vllm_choreo.planner.logical.nodes import BoundGraph, Value
from vllm_choreo.planner.logical.values import (
    Functions,
    PromptTurns,
    chosen_case,
    evaluate,
    prompt_text,
)
from vllm_choreo.planner.workers.facade import AnyFacade, as_worker
from vllm_choreo.planner.workers.worker import Worker, turns_of


def naive(
    compiled: BoundGraph, facade: AnyFacade | Worker, *, template: PromptTurns | None = None
) -> list[Value]:
    """Run a batch; return each query's value, or with several results a dict of them by name.

    Args:
        template: texts around the messages of a chat, see `Planner`.

    Raises:
        GraphError, ChoreoError: what an operator raises ends the run.
    """
    worker = as_worker(facade)
    return asyncio.run(_naive(compiled, worker, turns_of(worker, template)))


async def _naive(compiled: BoundGraph, worker: Worker, turns: PromptTurns) -> list[Value]:
    results = []
    for query in range(compiled.batch_size):
        run = _Query(compiled, worker, turns)
        outputs = compiled.graph.outputs
        values = {name: await run.value((n, query)) for name, n in outputs.items()}
        results.append(values if len(values) > 1 else next(iter(values.values())))
    return results


Place = tuple[int, int]  # number of an operator, and of a row of the batch


class _Query:
    """One query: the values of operators in rows of the batch, each computed when asked for."""

    def __init__(self, compiled: BoundGraph, worker: Worker, turns: PromptTurns) -> None:
        self._compiled = compiled
        self._worker, self._turns = worker, turns
        self._functions = Functions()
        self._values: dict[Place, Value] = {}

    async def value(self, wanted: Place) -> Value:
        stack = [wanted]  # no recursion: chains of operators may be long
        while stack:
            place = stack[-1]
            missing = [given for given in self._reads(place) if given not in self._values]
            if missing:
                stack += missing
                continue
            stack.pop()
            if place not in self._values:
                self._values[place] = await self._compute(place)
        return self._values[wanted]

    def _reads(self, place: Place) -> list[Place]:
        """Places that an operator reads; of a switch, its key and, once known, the chosen case."""
        number, row = place
        node = self._compiled.graph.nodes[number]
        if node.kind in ("batch_slice", "batch_concat"):
            rows = [(given, at) for given in node.inputs for at in range(self._num_rows(given))]
            chosen = rows[node.attrs.get("start") : node.attrs.get("stop")]
            return [chosen[row]]
        read = [(given, row) for given in node.inputs]
        if node.kind != "switch":
            return read
        if read[0] not in self._values:
            return read[:1]
        return [read[0], read[chosen_case(node, self._values[read[0]])]]

    def _num_rows(self, number: int) -> int:
        count = self._compiled.counts[number]
        return self._compiled.size if count is None else count

    async def _compute(self, place: Place) -> Value:
        number, row = place
        node = self._compiled.graph.nodes[number]
        if number in self._compiled.inputs:
            return self._compiled.inputs[number][row]
        inputs = [self._values[given] for given in self._reads(place)]
        if node.kind in ("switch", "batch_slice", "batch_concat"):
            return inputs[-1]
        if node.kind == "fn":
            return self._functions.call(node, inputs)
        if node.kind != "llm":
            return evaluate(node, inputs)
        prompt = prompt_text(node, inputs, self._turns)
        answer = await self._worker.decode(prompt, (), True, node.attrs["sampling"])
        return answer.text
