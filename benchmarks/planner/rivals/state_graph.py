# SPDX-License-Identifier: Apache-2.0
"""A batch as a `StateGraph` of LangGraph's: a node for each operator, `abatch` over the queries."""

import asyncio
import operator
from functools import partial
from typing import Annotated, Any, TypedDict

from langgraph.graph import START, StateGraph

from benchmarks.planner.rivals.text import WIDTH, Text
from vllm_choreo.planner.logical.nodes import Node


class State(TypedDict):
    """Of a query: the values of operators, by number."""

    values: Annotated[dict[int, Any], operator.or_]


async def langgraph(text: Text) -> list[dict[int, Any]]:
    """The values of all operators, query by query."""
    places = asyncio.Semaphore(WIDTH)

    async def run(number: int, node: Node, state: State) -> dict[str, Any]:
        inputs = [state["values"][given] for given in node.inputs]
        async with places:
            return {"values": {number: await text.value(number, inputs)}}

    builder = StateGraph(State)
    inputs = text.compiled.inputs
    for number, node in enumerate(text.compiled.graph.nodes):
        if number in inputs:
            continue
        builder.add_node(str(number), partial(run, number, node))
        made = sorted({given for given in node.inputs if given not in inputs})
        builder.add_edge([str(given) for given in made] if made else START, str(number))
    steps = len(text.compiled.graph.nodes) + 1
    given: list[Any] = [{"values": values} for values in text.given()]
    found = await builder.compile().abatch(given, config={"recursion_limit": steps})
    return [state["values"] for state in found]
