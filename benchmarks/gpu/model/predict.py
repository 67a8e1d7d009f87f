# SPDX-License-Identifier: Apache-2.0
"""Predictions with what the bounds leave open, and the lengths from which choreography gains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.gpu.model.bounds import (
    GPUS,
    MODELS,
    OURS,
    SHARED,
    Bound,
    rates,
)
from benchmarks.gpu.model.bounds import STOCK as OF_STOCK
from benchmarks.gpu.model.cost import STOCK, WAYS, Machine, Times, Way, times
from benchmarks.gpu.model.counts import FIRST, PREFILL, Counts, count_readers

FIGURES = ("first_token", "decode_step", "total")
# Tokens of a message that calls read, and answers' tokens up to which they gain.
READ = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
READERS = (1, 3, 16)
_SIZES = ("Llama-3.1-8B", "Llama-3.3-70B")
_ANSWER = 64  # over which the step of an answer is taken
Row = Mapping[str, Any]


def workflow_rows(
    name: str,
    counts: Mapping[bool, Counts],
    gpus: Iterable[str] = GPUS,
    models: Iterable[str] = MODELS,
) -> Iterator[Row]:
    """A row for each GPU, model and way: milliseconds and ratios, `_low` and `_high` of each."""
    for gpu, model in product(gpus, models):
        machine = Machine.of(GPUS[gpu], MODELS[model])
        for way in WAYS:
            of_way = counts[way.is_choreographed]
            yield {
                "gpu": gpu,
                "model": model,
                "gpus": machine.count,
                "workflow": name,
                "side": way.name,
                **_milliseconds(machine, of_way, way),
                **_ratios(machine, counts, way),
                "encoded_tokens": int(of_way.tokens[of_way.kind <= FIRST].sum()),
                "encoded_for_first_tokens": int(of_way.tokens[of_way.kind == FIRST].sum()),
                "encoded_before": int(of_way.tokens[of_way.kind == PREFILL].sum()),
            }


def bounds_of(way: Way) -> Mapping[str, Bound]:
    """Bounds of the rates that only this way has."""
    return OURS if way.is_choreographed else OF_STOCK


def middle(way: Way) -> Mapping[str, float]:
    """The middle of these bounds."""
    return {name: (bound.slow + bound.fast) / 2 for name, bound in bounds_of(way).items()}


def _all_slow(bounds: Mapping[str, Bound]) -> Mapping[str, float]:
    return {name: bound.slow for name, bound in bounds.items()}


def _all_fast(bounds: Mapping[str, Bound]) -> Mapping[str, float]:
    return {name: bound.fast for name, bound in bounds.items()}


def _corners(bounds: Mapping[str, Bound]) -> Iterator[Mapping[str, float]]:
    for chosen in product(*((bound.slow, bound.fast) for bound in bounds.values())):
        yield dict(zip(bounds, chosen, strict=True))


def _milliseconds(machine: Machine, counts: Counts, way: Way) -> Row:
    """Every figure in the middle of the bounds, where all is fast and where all is slow."""
    bounds = {**SHARED, **bounds_of(way)}
    choices = (middle(way), _all_fast(bounds), _all_slow(bounds))
    found = [times(machine, counts, way, rates(**choice)) for choice in choices]
    return {
        f"{name}{end}": round(1e3 * getattr(of_choice, figure), 3)
        for figure, name in zip(FIGURES, _NAMES, strict=True)
        for end, of_choice in zip(_ENDS, found, strict=True)
    }


def _ratios(machine: Machine, counts: Mapping[bool, Counts], way: Way) -> Row:
    """Stock's time / this way's: what both have in common is the same on both sides.

    The ends are the least and the most at the corners of the common bounds, with all that is
    stock's alone fast and all that is this way's alone slow, and the other way round.
    """
    if way is STOCK:
        return {}
    ours = bounds_of(way)
    choices: list[tuple[Mapping[str, float], ...]] = [({}, middle(STOCK), middle(way))]
    for shared in _corners(SHARED):
        choices.append((shared, _all_fast(OF_STOCK), _all_slow(ours)))
        choices.append((shared, _all_slow(OF_STOCK), _all_fast(ours)))
    found = []
    for common, of_stock, of_way in choices:
        stock = times(machine, counts[False], STOCK, rates(**common, **of_stock))
        found.append(_over(stock, times(machine, counts[True], way, rates(**common, **of_way))))
    return {
        f"{figure}_ratio{end}": round(value, 3)
        for i, figure in enumerate(FIGURES)
        for end, value in zip(_ENDS, _middle_least_most(f[i] for f in found), strict=True)
    }


def _over(above: Times, below: Times) -> Sequence[float]:
    return [getattr(above, figure) / getattr(below, figure) for figure in FIGURES]


def _middle_least_most(values: Iterable[float]) -> Sequence[float]:
    found = list(values)
    return found[0], min(found), max(found)


_NAMES = ("ttft_mean_ms", "decode_step_ms", "total_ms")
_ENDS = ("", "_low", "_high")


def break_even_rows() -> Iterator[Row]:
    """Rows of gains by the tokens that calls read, for every GPU, model and way of ours."""
    for readers, read in product(READERS, READ):
        counts = count_readers(read, readers, _ANSWER)
        for gpu, model in product(GPUS, _SIZES):
            machine = Machine.of(GPUS[gpu], MODELS[model])
            stock = times(machine, counts[False], STOCK, rates(**middle(STOCK)))
            for way in WAYS[1:]:
                ours = times(machine, counts[True], way, rates(**middle(way)))
                yield {
                    "gpu": gpu,
                    "model": model,
                    "gpus": machine.count,
                    "readers": readers,
                    "read_tokens": read,
                    "side": way.name,
                    "first_token_ratio": round(stock.first_token / ours.first_token, 3),
                    "decode_step_ratio": round(stock.decode_step / ours.decode_step, 3),
                    "break_even_tokens": round(break_even_answer(stock, ours), 1),
                }


def break_even_answer(stock: Times, ours: Times) -> float:
    """Tokens of an answer at which both sides end at once; shorter ones gain, infinite: all do.

    0: there is no gain, however short the answer.
    """
    gained = stock.first_token - ours.first_token
    lost = ours.decode_step - stock.decode_step
    if gained <= 0:
        return 0.0
    return 1.0 + gained / lost if lost > 0 else math.inf
