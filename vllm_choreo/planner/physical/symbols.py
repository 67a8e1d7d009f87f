# SPDX-License-Identifier: Apache-2.0
"""Prompts of operators as symbols: text of the graph, and numbers of operators that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_choreo.planner.logical.values import Template, prompt_pieces
from vllm_choreo.planner.physical.radix import Symbol
from vllm_choreo.planner.plan import Plan


def spell_operators(plan: Plan) -> Plan:
    """Write the prompt of each `llm` operator that has calls as symbols."""
    graph = plan.graph
    live = {plan.tasks[call].node for call in plan.asked}
    texts: dict[int, list[Symbol]] = {}

    def spread(number: int) -> list[Symbol]:
        node = graph.nodes[number]
        if node.kind == "data" and node.type == "text" and "value" in node.attrs:
            return [node.attrs["value"]]
        if node.kind != "fmt":
            return [number]
        if number not in texts:
            texts[number] = spread_pieces(node.attrs["pieces"], node.inputs, spread)
        return texts[number]

    template, found = plan.target.template, {}
    for number, node in enumerate(graph.nodes):
        if number in live:
            symbols = spread_pieces(prompt_pieces(node, template), node.inputs, spread)
            found[number] = join_texts(symbols, template)
    return replace(plan, operators=found)


def spread_pieces(
    pieces: Sequence[str | int],
    inputs: Sequence[int],
    spread: Callable[[int], list[Symbol]],
) -> list[Symbol]:
    """Put the symbols of inputs, given by `spread`, in place of their numbers."""
    symbols: list[Symbol] = []
    for piece in pieces:
        symbols += [piece] if isinstance(piece, str) else spread(inputs[piece])
    return symbols


def join_texts(symbols: Sequence[Symbol], template: Template) -> list[Symbol]:
    """Join neighbouring texts of one turn of a prompt."""
    found: list[Symbol] = []
    for symbol in symbols:
        last = found[-1] if found else 0
        if (
            isinstance(symbol, str)
            and isinstance(last, str)
            and not last.endswith(template.closing)
        ):
            found[-1] = last + symbol
        elif symbol != "":
            found.append(symbol)
    return found
