# SPDX-License-Identifier: Apache-2.0
"""Prompts of calls as symbols: text, and numbers of tasks whose values are filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_choreo.planner.logical.expand import LogicalPlan
from vllm_choreo.planner.logical.nodes import Operators
from vllm_choreo.planner.logical.values import Template, prompt_pieces
from vllm_choreo.planner.physical.radix import Symbol, estimated_tokens

# A message of fewer tokens saves less than its request and its half-empty block cost.
MIN_SHARED_TOKENS = 24.0


def call_symbols(
    plan: LogicalPlan, template: Template, apart: Collection[int] = ()
) -> dict[int, list[Symbol]]:
    """Symbols of each call's prompt: text that is known by now, else the number of its task.

    Args:
        apart: tasks that stay numbers though their text is known.
    """
    texts: dict[int, list[Symbol]] = {}

    def spread(task: int) -> list[Symbol]:
        node = plan.node(task)
        if node.kind != "fmt":
            return [task if task in apart else plan.known.get(task, task)]
        if task not in texts:
            inputs = plan.tasks[task].inputs
            texts[task] = _spread(node.attrs["pieces"], inputs, spread)
        return texts[task]

    found = {}
    for call in plan.calls():
        pieces = prompt_pieces(plan.node(call), template)
        symbols = _spread(pieces, plan.tasks[call].inputs, spread)
        found[call] = joined(symbols, template)
    return found


def read_apart(
    plan: LogicalPlan, template: Template, reads_message: Callable[[int, int], bool]
) -> frozenset[int]:
    """Tasks whose values are known by now, and that several calls read as a message.

    Args:
        reads_message: tells whether an operator reads another one's value as a message.
    """
    counts: Counter[int] = Counter()
    for call, symbols in call_symbols(plan, template, plan.known).items():
        reader = plan.tasks[call].node
        for symbol in set(symbols):
            if isinstance(symbol, int) and symbol in plan.known:
                counts[symbol] += reads_message(reader, plan.tasks[symbol].node)
    return frozenset(task for task, count in counts.items() if count > 1)


def operator_symbols(graph: Operators, template: Template) -> dict[int, list[Symbol]]:
    """Symbols of each `llm` operator's prompt: text of the graph itself, else numbers of nodes."""
    texts: dict[int, list[Symbol]] = {}

    def spread(number: int) -> list[Symbol]:
        node = graph.nodes[number]
        if node.kind == "data" and node.type == "text" and "value" in node.attrs:
            return [node.attrs["value"]]
        if node.kind != "fmt":
            return [number]
        if number not in texts:
            texts[number] = _spread(node.attrs["pieces"], node.inputs, spread)
        return texts[number]

    found = {}
    for number, node in enumerate(graph.nodes):
        if node.kind == "llm":
            symbols = _spread(prompt_pieces(node, template), node.inputs, spread)
            found[number] = joined(symbols, template)
    return found


def _spread(
    pieces: Sequence[str | int],
    inputs: Sequence[int],
    spread: Callable[[int], list[Symbol]],
) -> list[Symbol]:
    symbols: list[Symbol] = []
    for piece in pieces:
        symbols += [piece] if isinstance(piece, str) else spread(inputs[piece])
    return symbols


def joined(symbols: Sequence[Symbol], template: Template) -> list[Symbol]:
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


def going_on(prompts: Mapping[int, Sequence[Symbol]]) -> dict[int, int]:
    """Last call with whose prompt and answer each call's prompt begins, where there is one.

    Such calls continue a chat.
    """
    found = {}
    for call, symbols in prompts.items():
        for i in range(len(symbols) - 1, 0, -1):
            before = symbols[i]
            if isinstance(before, int) and prompts.get(before) == symbols[:i]:
                found[call] = before
                break
    return found


# -- where prompts are cut -------------------------------------------------------------------------


@dataclass
class Cuts:
    """Cuts of prompts: ends of the prefixes that are messages of their own, for several readers.

    Attributes:
        at: numbers of symbols, each the last one of such a prefix, by call.
        static: prefixes that every batch has, as texts one after the other.
    """

    at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    static: set[tuple[str, ...]] = field(default_factory=set)


def cuts(
    prompts: Mapping[int, Sequence[Symbol]],
    operators: Mapping[int, Sequence[Symbol]],
    template: Template,
    *,
    anywhere: bool = False,
    weigh: Callable[[int], float] = lambda task: 0.0,
) -> Cuts:
    """Find where prompts are cut, so that their prefixes are shared.

    Args:
        prompts, operators: symbols by `call_symbols` and `operator_symbols`.
        template: chat template; a turn ends with its `closing`.
        anywhere: cut inside turns, too, where texts that are tokenised apart may not have the
            tokens that they have together.
        weigh: estimates the tokens of a task's value.
    """

    def ends_turn(symbol: Symbol) -> bool:
        return isinstance(symbol, str) and symbol.endswith(template.closing)

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
    found = Cuts(static=_static(operators, ends_turn))
    for call, path in paths.items():
        symbols = prompts[call]
        allowed = [i for i in range(len(path)) if anywhere or ends_turn(symbols[i])]
        at = []
        for i, after in zip(allowed, [*allowed[1:], None], strict=True):
            shared, further = counts[path[i]], counts[path[after]] if after is not None else 0
            if shared > 1 and further < shared:
                at.append(i)
        ends = (i for i in allowed if _is_static(symbols[: i + 1], found.static))
        found.at[call] = _heavy(tuple(sorted({*at, *ends})), symbols, weigh)
    return found


def _heavy(
    at: tuple[int, ...], symbols: Sequence[Symbol], weigh: Callable[[int], float]
) -> tuple[int, ...]:
    """Keep the cuts whose pieces are long enough to be worth a message."""
    kept, weight, start = [], 0.0, 0
    for i in at:
        for symbol in symbols[start : i + 1]:
            weight += estimated_tokens(symbol) if isinstance(symbol, str) else weigh(symbol)
        start = i + 1
        if weight >= MIN_SHARED_TOKENS:
            kept.append(i)
            weight = 0.0
    return tuple(kept)


def _is_static(symbols: Sequence[Symbol], static: set[tuple[str, ...]]) -> bool:
    return tuple(symbols) in static


def _static(
    operators: Mapping[int, Sequence[Symbol]], ends_turn: Callable[[Symbol], bool]
) -> set[tuple[str, ...]]:
    """Longest prefixes of operators' prompts that the graph alone determines."""
    found = set()
    for symbols in operators.values():
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
    return found
