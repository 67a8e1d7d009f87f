# SPDX-License-Identifier: Apache-2.0
"""Prompts of calls as symbols: text, and numbers of tasks whose values are filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from vllm_choreo.planner.logical.values import prompt_pieces
from vllm_choreo.planner.physical.radix import Symbol
from vllm_choreo.planner.physical.symbols import join_texts, spread_pieces
from vllm_choreo.planner.plan import Plan


def spell_calls(plan: Plan) -> Plan:
    """Write each call's prompt as symbols: text that is known by now, else the number of its task.

    What several calls read as a message stays a number though its text is known.
    """
    has_messages = any(choice.how == "message" for choice in plan.choices.values())
    apart = _read_apart(plan) if has_messages else frozenset()
    return replace(plan, prompts=_symbols(plan, apart))


def continue_chats(plan: Plan) -> Plan:
    """Find, for an exact plan, the last call with whose prompt and answer each call's begins."""
    if plan.target.semantics != "exact":
        return plan
    found, prompts = {}, plan.prompts
    for call, symbols in prompts.items():
        for i in range(len(symbols) - 1, 0, -1):
            before = symbols[i]
            if isinstance(before, int) and prompts.get(before) == symbols[:i]:
                found[call] = before
                break
    return replace(plan, goes_on=found)


def _read_apart(plan: Plan) -> frozenset[int]:
    """Tasks whose values are known by now, and that several calls read as a message."""
    counts: Counter[int] = Counter()
    for call, symbols in _symbols(plan, plan.known).items():
        for symbol in set(symbols):
            if isinstance(symbol, int) and symbol in plan.known:
                counts[symbol] += plan.reads_message(call, symbol)
    return frozenset(task for task, count in counts.items() if count > 1)


def _symbols(plan: Plan, apart: Collection[int]) -> dict[int, list[Symbol]]:
    """Symbols of each call's prompt; tasks of `apart` stay numbers."""
    texts: dict[int, list[Symbol]] = {}

    def spread(task: int) -> list[Symbol]:
        node = plan.node(task)
        if node.kind != "fmt":
            return [task if task in apart else plan.known.get(task, task)]
        if task not in texts:
            texts[task] = spread_pieces(node.attrs["pieces"], plan.tasks[task].inputs, spread)
        return texts[task]

    template, found = plan.target.template, {}
    for call in plan.asked:
        pieces = prompt_pieces(plan.node(call), template)
        symbols = spread_pieces(pieces, plan.tasks[call].inputs, spread)
        found[call] = join_texts(symbols, template)
    return found
