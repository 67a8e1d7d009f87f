# SPDX-License-Identifier: Apache-2.0
"""The profile itself: cells are tried coarse to fine, the best are asked for answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import Bench
from vllm_choreo.lab.study.profile_pair.cell_arms import Pair, cell_name
from vllm_choreo.lab.study.profile_pair.grid import coarse, finer, scattered, singles, steps
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT, Judged, rows_of
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.lab.workflows.together import all_made, run_together
from vllm_choreo.repair.pair import Cell, Ranges, num_run, pareto
from vllm_choreo.transcript.transcript import Transcript

if TYPE_CHECKING:
    from vllm import LLM

Made = TypeVar("Made")

# Around so many of the best cells the next round looks closer.
NUM_REFINED = 4
PLAIN: Ranges = ()


@dataclass
class Profiling:
    """Problems of one set, on which a pair is tried.

    Args:
        llm: engine in this process, which forces tokens, with room for adapters and hidden states.
        pair: writer and reader.
        problems: set of one problem at least.
        on_run: called after replays and runs, with the number of their problems.
        num_together: problems that are run side by side; of models one, for each has a store.

    Attributes:
        text: the reader's own encoding, problem by problem.
        found: judgements of each choice of layers, mostly without answers of its own.
        answered: judgements of the choices that were asked for answers.
        num_read: tokens that a call reads, the mean of those that generate.
    """

    llm: LLM
    pair: Pair
    problems: HeldOutSet
    on_run: Callable[[int], object]
    num_together: int = 1
    text: list[Judged] = field(default_factory=list)
    found: dict[Ranges, list[Judged]] = field(default_factory=dict)
    answered: dict[Ranges, list[Judged]] = field(default_factory=dict)
    num_read: float = 0.0

    def __post_init__(self) -> None:
        text, tasks = self.pair.text, self.problems.tasks
        begin = partial(Bench, workflow=self.problems.workflow, text=text)
        self._benches: list[Bench] = []
        for some in self._batches(tasks):
            self._benches += self._run(text, some[0], [partial(begin, task=task) for task in some])
        self.text = [bench.text for bench in self._benches]
        self.num_read = fmean(_num_read(bench.said) for bench in self._benches)
        self.replay([PLAIN])

    def replay(self, choices: Iterable[Ranges]) -> None:
        """Measure how far each choice is from the reader's own encoding; known ones stay."""
        for layers in choices:
            if layers not in self.found:
                self.found[layers] = self._made(Bench.replayed, layers)

    def answer(self, choices: Iterable[Ranges]) -> None:
        """Measure each choice with answers of its own, which takes twice as long."""
        for layers in choices:
            if layers not in self.answered:
                self.answered[layers] = self.found[layers] = self._made(Bench.judged, layers)

    def _made(self, how: Callable[..., Judged], layers: Ranges) -> list[Judged]:
        found: list[Judged] = []
        arm = self.pair.arm(layers)
        for some in self._batches(self._benches):
            found += self._run(arm, some[0].task, [partial(how, bench, arm=arm) for bench in some])
        return found

    def _batches(self, given: Sequence[Made]) -> Iterator[Sequence[Made]]:
        for start in range(0, len(given), self.num_together):
            yield given[start : start + self.num_together]

    def _run(
        self, arm: Arm, first: Task, programs: Sequence[Callable[[Facade], Made]]
    ) -> list[Made]:
        with arm.open(self.llm, first) as c:
            results = run_together(c, programs)
        self.on_run(len(results))
        return all_made(results)

    def cells(self) -> list[Cell]:
        """Cells that were tried, the plain reading first."""
        return [self._cell(layers) for layers in self.found]

    def rows(self) -> list[dict[str, Any]]:
        """Rows of an evaluation: the reader's own encoding, and the cells with answers."""
        plain = self.answered.get(PLAIN) or self.found[PLAIN]
        others = {cell_name(layers): found for layers, found in self.answered.items() if layers}
        return rows_of({TEXT: self.text, CHOREOGRAPHED: plain, **others})

    def inputs(self) -> list[dict[str, Any]]:
        """Every cell problem by problem: one mean hides inputs that lose much.

        Returns:
            For each cell `layers`; `kl`, nats per token of each problem; `closed`, the share of the
            distance between plain reading and the own encoding; None: they do not differ.
        """
        plain = [_per_token(one) for one in self.found[PLAIN]]
        found = []
        for layers, judged in self.found.items():
            kls = [_per_token(one) for one in judged]
            closed = [1.0 - kl / its if its else None for kl, its in zip(kls, plain, strict=True)]
            found.append({"layers": layers, "kl": kls, "closed": closed})
        return found

    def _cell(self, layers: Ranges) -> Cell:
        name, plain = cell_name(layers), self.found[PLAIN]
        judged = self.answered.get(layers, self.found[layers])
        rows = rows_of({TEXT: self.text, CHOREOGRAPHED: plain, name: judged})
        row = rows[-1]
        closed = row["kl_gap_closed"]
        return Cell(
            layers=layers,
            # Of a pair that does not differ at all nothing is lost.
            quality_loss=(1.0 if rows[1]["kl"] else 0.0) if closed is None else 1.0 - closed,
            kl=row["kl"],
            kl_low=row["kl_low"],
            kl_high=row["kl_high"],
            encoded=row["encoded"],
            ttft=row["ttft"],
            accuracy=row["accuracy"],
            difference=row["difference"],
        )


def search(profiling: Profiling, num_layers: int) -> None:
    """Try blocks of layers, coarse to fine."""
    profiling.replay(coarse(num_layers))
    for step in steps(num_layers):
        best = [cell.layers for cell in promising(pareto(profiling.cells()), num_layers)]
        profiling.replay(finer(best, step, num_layers))


def promising(best: Sequence[Cell], num_layers: int) -> list[Cell]:
    """The cells where a frontier bends most: those farthest under the line between its ends.

    The line is that of reading as it is (no layer, all is lost) to encoding all (nothing is lost).
    """
    inner = [cell for cell in best if 0 < cell.num_layers < num_layers]
    inner.sort(key=lambda cell: cell.num_layers / num_layers + cell.quality_loss)
    return inner[:NUM_REFINED]


def map_layers(profiling: Profiling, num_layers: int, counts: Sequence[int]) -> dict[str, Any]:
    """Measure what each layer gains alone, and what the best of them gain together, apart.

    Args:
        counts: numbers of layers that are put together (the paper's figure 11).

    Returns:
        `gains`: of each layer, the share of the distance that it closes; `scattered`: cells.
    """
    profiling.replay(singles(num_layers))
    by_layers = {cell.layers: cell for cell in profiling.cells()}
    gains = [1.0 - by_layers[layers].quality_loss for layers in singles(num_layers)]
    chosen = [scattered(gains, count) for count in counts]
    profiling.replay(chosen)
    by_layers = {cell.layers: cell for cell in profiling.cells()}
    return {"gains": gains, "scattered": [by_layers[layers] for layers in chosen]}


def contiguous(cells: Iterable[Cell]) -> Mapping[int, Cell]:
    """The best block that is whole, by the number of its layers."""
    best: dict[int, Cell] = {}
    for cell in cells:
        count = num_run(cell.layers)
        is_better = count not in best or cell.quality_loss < best[count].quality_loss
        if len(cell.layers) == 1 and is_better:
            best[count] = cell
    return best


def _per_token(one: Judged) -> float:
    """Nats per token of a problem."""
    return (one.kl or 0.0) / one.num_tokens if one.num_tokens else 0.0


def _num_read(said: Transcript) -> float:
    """Tokens of all parents of a call, the mean of those that generate."""
    lengths = {step.message.id: step.message.num_tokens for step in said.steps}
    return fmean(
        sum(len(range(lengths[span.id])[span.start : span.stop]) for span in step.message.parents)
        for step in said.decodes()
    )
