# SPDX-License-Identifier: Apache-2.0
"""Cuts of prompts, so that what begins alike for several calls is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from vllm_choreo.planner.physical.radix import Symbol, TemplatedRadixTree, TreeNode
from vllm_choreo.planner.plan import Cuts, Plan

# A message of fewer tokens saves less than its request and its half-empty block cost.
MIN_SHARED_TOKENS = 24.0


def cut(plan: Plan) -> Plan:
    """Find where prompts are cut, so that their prefixes are shared.

    Cuts lie inside turns, too, where texts that are tokenised apart may not have the tokens that
    they have together: a run leaves such cuts out, see `execute.read.drop_inexact_links`.
    """
    static = _static(plan.operators.values(), plan.target.turns.ends_turn)
    beginnings = {chain[: i + 1] for chain in static for i in range(len(chain))}
    prompts = _split_texts(plan, beginnings)
    ids: dict[tuple[int, Symbol], int] = {}
    counts: dict[int, int] = {}
    paths: dict[int, list[int]] = {}
    for call, symbols in prompts.items():
        above, path = 0, []
        for symbol in symbols[:-1]:  # the last one is the header
            above = ids.setdefault((above, symbol), len(ids) + 1)
            counts[above] = counts.get(above, 0) + 1
            path.append(above)
        paths[call] = path
    found = {}
    for call, path in paths.items():
        symbols = prompts[call]
        shared = [*(counts[node] for node in path), 0]
        at = (i for i in range(len(path)) if shared[i] > 1 and shared[i + 1] < shared[i])
        ends = (i for i in range(len(path)) if tuple(symbols[: i + 1]) in static)
        found[call] = _heavy(sorted({*at, *ends}), symbols, plan.weigh)
    return replace(plan, prompts=prompts, cuts=Cuts(found, static))


def _split_texts(plan: Plan, beginnings: Collection[tuple[str, ...]]) -> dict[int, list[Symbol]]:
    """Split the texts of prompts where they differ; prompts stay equal as far as they were.

    Args:
        beginnings: those that every batch has, whose texts stay whole.
    """
    tree = TemplatedRadixTree(plan.size)
    for call, symbols in plan.prompts.items():
        tree.add(call, symbols)
    return {
        call: list(_along(symbols, tree.end[call].path(), beginnings))
        for call, symbols in plan.prompts.items()
    }


def _along(
    symbols: Sequence[Symbol], path: Sequence[TreeNode], beginnings: Collection[tuple[str, ...]]
) -> Iterator[Symbol]:
    """Yield the symbols of a prompt, with texts in the pieces of its path in the tree."""
    nodes, is_static = iter(path), True
    for i, symbol in enumerate(symbols):
        is_static = is_static and tuple(symbols[: i + 1]) in beginnings
        length, pieces = 0, list[Symbol]()
        while not pieces or (isinstance(symbol, str) and length < len(symbol)):
            pieces.append(next(nodes).symbol)
            length += len(str(pieces[-1]))
        yield from [symbol] if is_static else pieces


def _heavy(
    at: Sequence[int], symbols: Sequence[Symbol], weigh: Callable[[Symbol], float]
) -> tuple[int, ...]:
    """Keep the cuts whose pieces are long enough to be worth a message."""
    kept, weight, start = [], 0.0, 0
    for i in at:
        for symbol in symbols[start : i + 1]:
            weight += weigh(symbol)
        start = i + 1
        if weight >= MIN_SHARED_TOKENS:
            kept.append(i)
            weight = 0.0
    return tuple(kept)


def _static(
    prompts: Iterable[Sequence[Symbol]], ends_turn: Callable[[str], bool]
) -> frozenset[tuple[str, ...]]:
    """Longest prefixes of operators' prompts that the graph alone determines."""
    found = set()
    for symbols in prompts:
        texts: list[str] = []
        best: tuple[str, ...] = ()
        for symbol in symbols[:-1]:
            if not isinstance(symbol, str):
                break
            texts.append(symbol)
            if ends_turn(symbol):
                best = tuple(texts)
        if best:
            found.add(best)
    return frozenset(found)
