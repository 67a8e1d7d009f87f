# SPDX-License-Identifier: Apache-2.0
"""Planning and running of compiled graphs: `invoke` runs one, `Planner` batch after batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack, overload

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.execute.answer_cache import AnswerCache, ModelCache
from vllm_choreo.planner.execute.execution import Execution
from vllm_choreo.planner.execute.journal import Journal
from vllm_choreo.planner.execute.lanes import lanes_page
from vllm_choreo.planner.execute.progress import Progress
from vllm_choreo.planner.execute.retry import Retry
from vllm_choreo.planner.execute.run_stats import RunStats
from vllm_choreo.planner.execute.shared_messages import SharedMessages
from vllm_choreo.planner.logical.fetch import fetch
from vllm_choreo.planner.logical.graph import CompiledGraph, Graph
from vllm_choreo.planner.logical.nodes import Value
from vllm_choreo.planner.logical.values import PromptTurns
from vllm_choreo.planner.physical.choose import SEMANTICS
from vllm_choreo.planner.physical.cost import CostModel
from vllm_choreo.planner.physical.profile import Profile
from vllm_choreo.planner.pipeline import make_plan
from vllm_choreo.planner.plan import Pass, Plan, Target
from vllm_choreo.planner.workers.facade import AnyFacade, as_worker
from vllm_choreo.planner.workers.worker import Uri, Worker, turns_of

Result = Value  # of a query's result; with several results a dict of their values by name
OnResult = Callable[[int, Result], None]
Workers = AnyFacade | Worker | Sequence[AnyFacade | Worker]


@dataclass(frozen=True)
class BatchResult(Sequence[Result]):
    """Results of a batch, one for each query, in their order.

    Taking the result of a query that failed raises its error; `errors` has them all.

    Attributes:
        values: results of the queries that succeeded, by number.
        errors: errors of the queries that failed, by number.
        plan: plan that was run.
        stats: measurements of the run.
    """

    values: dict[int, Result]
    errors: dict[int, GraphError]
    plan: Plan
    stats: RunStats

    @overload
    def __getitem__(self, query: int) -> Result: ...

    @overload
    def __getitem__(self, query: slice) -> list[Result]: ...

    def __getitem__(self, query: int | slice) -> Result | list[Result]:
        if isinstance(query, slice):
            return [self[number] for number in range(len(self))[query]]
        number = range(len(self))[query]
        if number in self.errors:
            raise self.errors[number]
        return self.values[number]

    def page(self, title: str = "Run of a plan") -> str:
        """Draw the run as an HTML page: which worker ran what, and when."""
        return lanes_page(self.plan, self.stats, title)

    def __len__(self) -> int:
        return len(self.values) + len(self.errors)

    def __repr__(self) -> str:
        return repr([self.values.get(n, self.errors.get(n)) for n in range(len(self))])


class PlannerOptions(TypedDict, total=False):
    """Arguments of `Planner`, which has them explained."""

    semantics: str
    cache: AnswerCache | None
    profile: Profile | None
    cost: CostModel | None
    template: PromptTurns | None
    retry: Retry | None
    kept: Uri | None


class Planner:
    """Planner of batches, which it runs on workers.

    Args:
        workers: a facade (`Choreography`, `AsyncChoreography`, a client), or a list of them or of
            `Worker`s, all with the same model.
        semantics: "exact": answers are those of the naive run, query by query, each prompt as text;
            "choreo": answers of other operators are read as messages, where that is cheaper.
        cache: the answer cache; None: none.
        profile: lengths of answers; every run adds its own.
        cost: the cost model.
        template: texts around the messages of a chat, a `Template` or a model's own (`ChatTurns`);
            None: those of the first worker's model, or ChatML where the worker does not know them.
        retry: policy of which failed calls are made again.
        kept: a folder or an fsspec URL in which keys and values of static prefixes outlive the
            engine (docs/keep.md); over HTTP a name. They are loaded before the first batch.

    Raises:
        GraphError: no such semantics, no worker, or a cache though the model is not known.
        ChoreoError: no template is given, and the model's own does not write turns alike.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        semantics: str = "exact",
        cache: AnswerCache | None = None,
        profile: Profile | None = None,
        cost: CostModel | None = None,
        template: PromptTurns | None = None,
        retry: Retry | None = None,
        kept: Uri | None = None,
    ) -> None:
        if semantics not in SEMANTICS:
            raise GraphError(
                f"the semantics are {' and '.join(SEMANTICS)}",
                parameter="semantics",
                value=semantics,
            )
        given: list[AnyFacade | Worker] = (
            list(workers) if isinstance(workers, Sequence) else [workers]
        )
        if not given:
            raise GraphError("at least one worker is needed", parameter="workers", value=given)
        self.workers: list[Worker] = [as_worker(worker) for worker in given]
        if cache is not None and self.workers[0].identity is None:
            raise GraphError(
                "which model answers is not known here, so its answers cannot be cached: say it by "
                "FacadeWorker(facade, model=...)",
                parameter="cache",
            )
        self.cache = cache
        self._retry = retry or Retry()
        self._kept = kept
        self.target = Target(
            semantics=semantics,
            num_workers=len(given),
            cost=cost or CostModel(),
            profile=profile or Profile(),
            turns=turns_of(self.workers[0], template),
        )
        self._readers = [SharedMessages(worker) for worker in self.workers]

    # -- planning ------------------------------------------------------------------------------

    def plan(self, compiled: CompiledGraph, journal: Journal | None = None) -> Plan:
        """Plan a batch as `invoke` does, without running it."""
        recall: list[Pass] = [] if journal is None else [journal.restore]
        if self.cache is not None:
            recall.append(partial(fetch, probe=ModelCache(self.cache, self.identity).probe))
        return make_plan(compiled, self.target, recall)

    @property
    def profile(self) -> Profile:
        """Lengths of answers, as measured by now."""
        return self.target.profile

    @property
    def identity(self) -> list[object]:
        """Models, semantics and chat template, on which answers depend besides their prompts."""
        models = [worker.identity for worker in self.workers]
        return [models[0], self.target.semantics, list(self.target.turns.to_json().values())]

    # -- running -------------------------------------------------------------------------------

    async def ainvoke(
        self,
        compiled: CompiledGraph,
        *,
        journal: str | Path | None = None,
        on_result: OnResult | None = None,
    ) -> BatchResult:
        """Run a batch.

        Args:
            compiled: the graph and its inputs.
            journal: file to which every value is written; a run that was killed goes on where it
                was, if it is given the same graph, inputs and file.
            on_result: called with each query's number and its result or error, as they come.

        Raises:
            JournalError: the journal is of another graph, inputs or model, or damaged.
            KeptError: a kept message does not fit this model, or is damaged; names the file.
            GraphError: the kept messages are not a planner's.
        """
        if isinstance(compiled, Graph):
            compiled = compiled.compile()
        if self._kept is not None:
            await asyncio.gather(*(reader.load(self._kept) for reader in self._readers))
        book = Journal(journal, compiled, self.identity) if journal is not None else None
        try:
            plan = self.plan(compiled, book)
            done = BatchResult({}, {}, plan, RunStats())

            def report(query: int, progress: Progress) -> None:
                _collect(done, query, progress)
                if on_result is not None:
                    on_result(query, done.values.get(query, done.errors.get(query)))

            run = Execution(
                plan,
                self.workers,
                retry=self._retry,
                cache=ModelCache(self.cache, self.identity),
                journal=book,
                on_query=report,
                readers=self._readers,
            )
            await run.run()
            if self._kept is not None:
                await self._readers[0].save(self._kept)  # all workers have the same
        finally:
            if book is not None:
                book.close()
        return replace(done, stats=run.stats)

    def invoke(
        self,
        compiled: CompiledGraph,
        *,
        journal: str | Path | None = None,
        on_result: OnResult | None = None,
    ) -> BatchResult:
        """Run a batch in a program without an event loop; takes the arguments of `ainvoke`.

        Raises:
            GraphError: an event loop is running; await `ainvoke` there.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.ainvoke(compiled, journal=journal, on_result=on_result))
        raise GraphError("an event loop is running here: await ainvoke(...)")


def _collect(done: BatchResult, query: int, progress: Progress) -> None:
    """Put the results of a query into `done`."""
    outputs = done.plan.outputs[query]
    for task in outputs.values():
        if task in progress.errors:
            done.errors[query] = progress.errors[task]
            return
    values = {name: progress.values[task] for name, task in outputs.items()}
    done.values[query] = values if len(values) > 1 else next(iter(values.values()))


def invoke(
    compiled: CompiledGraph,
    workers: Workers,
    *,
    journal: str | Path | None = None,
    on_result: OnResult | None = None,
    **options: Unpack[PlannerOptions],
) -> BatchResult:
    """Run a batch once.

    Args:
        compiled: the graph and its inputs.
        workers: a facade, or several: see `Planner`.
        journal, on_result: see `Planner.ainvoke`.
        options: arguments of `Planner`.
    """
    planner = Planner(workers, **options)
    return planner.invoke(compiled, journal=journal, on_result=on_result)


async def ainvoke(
    compiled: CompiledGraph,
    workers: Workers,
    *,
    journal: str | Path | None = None,
    on_result: OnResult | None = None,
    **options: Unpack[PlannerOptions],
) -> BatchResult:
    """Run a batch once, in an event loop; takes the arguments of `invoke`."""
    planner = Planner(workers, **options)
    return await planner.ainvoke(compiled, journal=journal, on_result=on_result)


def profile(sample: CompiledGraph, workers: Workers, **options: Unpack[PlannerOptions]) -> Profile:
    """Measure how many tokens the operators of a graph generate, on a sample batch.

    Returns:
        A profile for `invoke` or `Planner`, or to be saved.
    """
    planner = Planner(workers, **options)
    planner.invoke(sample)
    return planner.profile
