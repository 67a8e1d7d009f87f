# SPDX-License-Identifier: Apache-2.0
"""Prompts as symbols: text, and numbers of the operators or tasks whose values are filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from vllm_choreo.planner.logical.nodes import Node
from vllm_choreo.planner.logical.values import PromptTurns, as_text, prompt_pieces
from vllm_choreo.planner.physical.radix import Symbol, TemplatedRadixTree
from vllm_choreo.planner.plan import Plan


def spell_operators(plan: Plan) -> Plan:
    """Write the prompt of each `llm` operator that has calls as symbols."""
    nodes = plan.graph.nodes

    def symbol(number: int) -> Symbol:
        node = nodes[number]
        is_text = node.kind == "data" and node.type == "text" and "value" in node.attrs
        return str(node.attrs["value"]) if is_text else number

    spell = _speller(
        nodes.__getitem__, lambda number: nodes[number].inputs, symbol, plan.target.turns
    )
    operators = {
        number: spell(number) for number in sorted({plan.tasks[c].node for c in plan.asked})
    }
    tree = TemplatedRadixTree(plan.sizes.__getitem__)
    for number, symbols in operators.items():
        tree.add(number, symbols)
    return replace(plan, operators=operators, operator_tree=tree)


def spell_calls(plan: Plan) -> Plan:
    """Write each call's prompt as symbols: text that is known by now, else the number of its task.

    What several calls read as a message stays a number though its text is known.
    """
    has_messages = any(choice.how == "message" for choice in plan.choices.values())
    apart = _read_apart(plan) if has_messages else frozenset()
    return replace(plan, prompts=_spell_calls(plan, apart))


def continue_chats(plan: Plan) -> Plan:
    """Find, for an exact plan, the last call with whose prompt and answer each call's begins."""
    if plan.target.semantics != "exact":
        return plan
    found, prompts = {}, plan.prompts
    for call, symbols in prompts.items():
        for i in range(len(symbols) - 2, 0, -1):  # the header is text behind it
            before = symbols[i]
            if isinstance(before, int) and prompts.get(before) == symbols[:i]:
                found[call] = before
                break
    return replace(plan, goes_on=found)


def _read_apart(plan: Plan) -> frozenset[int]:
    """Tasks whose values are known by now, and that several calls read as a message."""
    counts: Counter[int] = Counter()
    for call, symbols in _spell_calls(plan, plan.known).items():
        for symbol in set(symbols):
            if isinstance(symbol, int) and symbol in plan.known:
                counts[symbol] += plan.reads_message(call, symbol)
    return frozenset(task for task, count in counts.items() if count > 1)


def _spell_calls(plan: Plan, apart: Collection[int]) -> dict[int, list[Symbol]]:
    """Symbols of each call's prompt; tasks of `apart` stay numbers."""

    def symbol(task: int) -> Symbol:
        is_known = task in plan.known and task not in apart
        return as_text(plan.known[task], plan.target.turns) if is_known else task

    spell = _speller(plan.node, lambda task: plan.tasks[task].inputs, symbol, plan.target.turns)
    return {call: spell(call) for call in plan.asked}


def _speller(
    node_of: Callable[[int], Node],
    inputs_of: Callable[[int], Sequence[int]],
    symbol_of: Callable[[int], Symbol],
    turns: PromptTurns,
) -> Callable[[int], list[Symbol]]:
    """Make the function that writes the prompt of an operator, or of a task, as symbols.

    Args:
        node_of: operator by its number, or by that of its task.
        inputs_of: numbers of what it reads.
        symbol_of: symbol of a value that is not composed of others.
        turns: texts around the messages of a chat.
    """
    composed: dict[int, list[Symbol]] = {}

    def spread(pieces: Sequence[str | int], inputs: Sequence[int]) -> list[Symbol]:
        symbols: list[Symbol] = []
        for piece in pieces:
            symbols += [piece] if isinstance(piece, str) else symbols_of(inputs[piece])
        return symbols

    def symbols_of(number: int) -> list[Symbol]:
        node = node_of(number)
        if node.kind != "fmt":
            return [symbol_of(number)]
        if number not in composed:
            composed[number] = spread(node.attrs["pieces"], inputs_of(number))
        return composed[number]

    def spell(number: int) -> list[Symbol]:
        pieces = prompt_pieces(node_of(number), turns)
        return _join_texts(spread(pieces, inputs_of(number)), turns)

    return spell


def _join_texts(symbols: Sequence[Symbol], turns: PromptTurns) -> list[Symbol]:
    """Join neighbouring texts of one turn of a prompt."""
    found: list[Symbol] = []
    for symbol in symbols:
        last = found[-1] if found else 0
        if isinstance(symbol, str) and isinstance(last, str) and not turns.ends_turn(last):
            found[-1] = last + symbol
        elif symbol != "":
            found.append(symbol)
    return found
