# SPDX-License-Identifier: Apache-2.0
"""Results of a profiled pair: `pair.json`, the numbers, a page, a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from vllm_choreo.cli.engine import LocalEngine
from vllm_choreo.lab.cli.report import aligned
from vllm_choreo.lab.report.pair import pair_html
from vllm_choreo.lab.study.profile_pair.cell_arms import Pair, cell_name
from vllm_choreo.lab.study.profile_pair.grid import coarse
from vllm_choreo.lab.study.profile_pair.profiling import (
    PLAIN,
    Profiling,
    contiguous,
    map_layers,
    search,
)
from vllm_choreo.lab.study.results import PAGE, scores_table, write_results
from vllm_choreo.lab.study.scores import Judged
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.lab.study.targets import MeasureTarget
from vllm_choreo.repair.pair import Cell, PairProfile, Ranges, num_run, pareto

if TYPE_CHECKING:
    from vllm import LLM

FORMAT = 1  # of profile.json
PROFILE, NUMBERS = "pair.json", "profile.json"
# Of the frontier, so many cells are asked for answers and tried on other problems.
MAX_ANSWERED = 6

_UNTIMED = (
    f"No {PROFILE} is left behind, for its times would be those of problems side by side: profile "
    "without --together."
)


def reached(cells: Sequence[Cell], target: MeasureTarget, num_layers: int) -> Cell | None:
    """Cell to take, of those that no other beats: see `MeasureTarget.choose`.

    None: no cell reaches the target, or only encoding everything anew does.
    """
    less = [cell for cell in pareto(cells) if cell.num_layers < num_layers]
    return target.choose(less, cost="num_layers", distance="quality_loss")


@dataclass(frozen=True)
class Tried:
    """Choices of layers that were tried, on all sets.

    Attributes:
        found: results on the problems that are profiled with.
        checked: name and rows of each of the other sets.
        layer_map: data of `map_layers`; None: not asked for.
        num_layers: layers of the model.
    """

    found: Profiling
    checked: list[dict[str, Any]]
    layer_map: dict[str, Any] | None
    num_layers: int


def measure(
    llm: LLM,
    pair: Pair,
    learnt: HeldOutSet,
    others: Sequence[HeldOutSet],
    *,
    tried: Sequence[Ranges] = (),
    maps_layers: bool = False,
    num_together: int = 1,
) -> Tried:
    """Try layers, the best of them on other problems, too.

    Args:
        llm: engine in this process, which forces tokens, with room for adapters and hidden states.
        learnt: problems that are profiled with.
        others: sets that have no part in that, on which the frontier is tried.
        tried: choices of layers that are tried alone; none: they are searched for.
        maps_layers: also try each layer by itself.
        num_together: problems that are run side by side; of models one.

    Raises:
        ChoreoError: a problem fails.
    """
    from tqdm import tqdm

    num_layers = llm.model_config.hf_text_config.num_hidden_layers
    everything: Ranges = ((0, num_layers),)
    with tqdm(desc="profiling", unit="replay", leave=False) as bar:
        found = Profiling(llm, pair, learnt, bar.update, num_together)
        if not tried:
            search(found, num_layers)
        best = tried or [cell.layers for cell in _thinned(pareto(found.cells()))]
        counts = sorted({num_run(ranges) for ranges in coarse(num_layers)})[:-1]
        layer_map = map_layers(found, num_layers, counts) if maps_layers else None
        asked = list(dict.fromkeys([PLAIN, *best, everything]))
        found.answer(asked)
        checked = []
        for one in others:
            other = Profiling(llm, pair, one, bar.update, num_together)
            other.answer(asked)
            checked.append({"name": one.name, "rows": other.rows(), "inputs": other.inputs()})
    return Tried(found, checked, layer_map, num_layers)


def write_profile(
    llm: LLM, pair: Pair, tried: Tried, target: MeasureTarget, out: Path, is_timed: bool
) -> int:
    """Print a table, write the numbers and a page, and the profile, which a session reads by.

    Args:
        llm: engine of the reader.
        pair: writer and reader.
        tried: see `measure`.
        target: loss or time that is to be reached.
        out: an existing folder.
        is_timed: times are those of requests by themselves; otherwise there is no profile.

    Returns:
        The exit status: 0, or 1 if no choice of layers reaches the target.
    """
    found, learnt = tried.found, tried.found.problems
    cells = found.cells()
    chosen = reached(cells, target, tried.num_layers)
    result = PairProfile(
        **pair.identity,
        num_layers=tried.num_layers,
        num_read=found.num_read,
        cells=tuple(cells),
        target=str(target),
        chosen=None if chosen is None else chosen.layers,
        measured={"workflow": learnt.workflow, "set": learnt.name, "problems": len(learnt.tasks)},
    )
    if is_timed:
        result.save(out / PROFILE)
    sets = [{"name": learnt.name, "rows": found.rows(), "inputs": found.inputs()}, *tried.checked]
    data = {
        "format": FORMAT,
        "facts": LocalEngine(llm).facts(()) | pair.names,
        "profile": result.to_json(),
        "layer_map": tried.layer_map and _map_json(tried.layer_map, cells),
        "sets": sets,
    }
    advice = _advice(chosen, result.target, out, found.text) if is_timed else _UNTIMED
    write_results(out, NUMBERS, data, pair_html(data, advice))
    columns = ("right", "difference", "KL", "KL gap", "encoded", "TTFT")
    print(scores_table(sets, {"layers anew": "arm"}, columns))
    print(f"\n{inputs_table(sets)}")
    print(f"{advice}\n\nOpen {out / PAGE}")
    return 0 if chosen is not None else 1


def inputs_table(sets: Sequence[Mapping[str, Any]]) -> str:
    """Shares of the distance that cells close on single inputs: quartiles and the worst."""
    lines = [("set", "layers anew", "least", "first quartile", "median", "third quartile", "most")]
    for one in sets:
        answered = {row["arm"] for row in one["rows"]}
        for cell in one["inputs"]:
            name, closed = cell_name(cell["layers"]), [c for c in cell["closed"] if c is not None]
            if name in answered and closed and cell["layers"]:
                least, most = min(closed), max(closed)
                ends = quantiles(closed, n=4, method="inclusive") if len(closed) > 1 else closed * 3
                shares = [f"{100 * share:.0f} %" for share in (least, *ends, most)]
                lines.append((one["name"], name, *shares))
    return aligned(lines, num_names=2)


def _thinned(best: Sequence[Cell]) -> list[Cell]:
    """A frontier's cells, evenly taken if there are many."""
    if len(best) <= MAX_ANSWERED:
        return list(best)
    step = (len(best) - 1) / (MAX_ANSWERED - 1)
    return [best[round(i * step)] for i in range(MAX_ANSWERED)]


def _map_json(layer_map: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """Single layers, and the best of them beside the best whole block of as many."""
    whole = contiguous(cells)
    compared = [
        {"scattered": to_builtins(cell), "contiguous": to_builtins(whole[cell.num_layers])}
        for cell in layer_map["scattered"]
        if cell.num_layers in whole
    ]
    return {"gains": layer_map["gains"], "compared": compared}


def _advice(chosen: Cell | None, target: str, out: Path, text: Sequence[Judged]) -> str:
    """Advice to the user, in a sentence; `text`: the reader's own encoding."""
    if chosen is None:
        return f"No choice of layers reaches {target}: encode everything anew (mode exact)."
    if not chosen.layers:
        return f"{target} is reached by reading messages as they are stored."
    own = fmean(one.ttft for one in text if one.ttft is not None)
    times = f", {own / chosen.ttft:.1f} times as fast to the first token"
    ranges = [list(one) for one in chosen.layers]
    return (
        f'{target} is reached by repair="{out / PROFILE}", which is '
        f'{{"layers": {json.dumps(ranges)}}}{times}.'
    )
