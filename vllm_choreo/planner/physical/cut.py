# SPDX-License-Identifier: Apache-2.0
"""Cuts of prompts, so that what begins alike for several calls is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm_choreo.planner.physical.radix import Symbol
from vllm_choreo.planner.plan import Cuts, Plan

# A message of fewer tokens saves less than its request and its half-empty block cost.
MIN_SHARED_TOKENS = 24.0


def cut(plan: Plan) -> Plan:
    """Find where prompts are cut, so that their prefixes are shared.

    Choreographed plans cut inside turns, too, where texts that are tokenised apart may not have the
    tokens that they have together.
    """
    turns, anywhere = plan.target.turns, plan.target.semantics == "choreo"

    def ends_turn(symbol: Symbol) -> bool:
        return isinstance(symbol, str) and turns.ends_turn(symbol)

    ids: dict[tuple[int, Symbol], int] = {}
    counts: dict[int, int] = {}
    paths: dict[int, list[int]] = {}
    for call, symbols in plan.prompts.items():
        above, path = 0, []
        for symbol in symbols[:-1]:  # the last one is the header
            above = ids.setdefault((above, symbol), len(ids) + 1)
            counts[above] = counts.get(above, 0) + 1
            path.append(above)
        paths[call] = path
    static, found = _static(plan.operators.values(), ends_turn), {}
    for call, path in paths.items():
        symbols = plan.prompts[call]
        allowed = [i for i in range(len(path)) if anywhere or ends_turn(symbols[i])]
        at = []
        for i, after in zip(allowed, [*allowed, None][1:], strict=True):
            shared, further = counts[path[i]], counts[path[after]] if after is not None else 0
            if shared > 1 and further < shared:
                at.append(i)
        ends = (i for i in allowed if tuple(symbols[: i + 1]) in static)
        found[call] = _heavy(sorted({*at, *ends}), symbols, plan.weigh)
    return replace(plan, cuts=Cuts(found, static))


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
    prompts: Iterable[Sequence[Symbol]], ends_turn: Callable[[Symbol], bool]
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
