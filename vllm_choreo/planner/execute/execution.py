# SPDX-License-Identifier: Apache-2.0
"""Execution of a batch: calls go to workers in the plan's order, as far as they can run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.execute.answer_cache import ModelCache
from vllm_choreo.planner.execute.held_answers import HeldAnswers
from vllm_choreo.planner.execute.journal import Journal
from vllm_choreo.planner.execute.progress import Progress
from vllm_choreo.planner.execute.read import (
    Key,
    Part,
    Reading,
    Told,
    drop_inexact_links,
    is_retold,
    reading,
    repeated,
)
from vllm_choreo.planner.execute.ready import ReadyCalls
from vllm_choreo.planner.execute.retry import MESSAGES_GONE, Retry
from vllm_choreo.planner.execute.run_stats import Lane, RunStats
from vllm_choreo.planner.execute.shared_messages import SharedMessages
from vllm_choreo.planner.logical.nodes import Node, Value
from vllm_choreo.planner.logical.values import Functions, as_text, failed
from vllm_choreo.planner.physical.radix import Symbol
from vllm_choreo.planner.plan import Plan
from vllm_choreo.planner.workers.worker import Answer, Worker


class Execution:
    """A run of a plan.

    Args:
        plan: calls, their workers and their order.
        workers: one for each worker of the plan.
        retry: policy of which failed calls are made again.
        cache: answer cache of deterministic operators' values.
        journal: file that every value is written to; None: none.
        on_query: called with (number, progress) of each query once its results are there.
        readers: shared messages of each worker, with those that earlier runs pinned.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[Worker],
        *,
        retry: Retry,
        cache: ModelCache,
        journal: Journal | None,
        on_query: Callable[[int, Progress], None],
        readers: Sequence[SharedMessages],
    ) -> None:
        self.plan, self.workers = plan, workers
        self.stats = RunStats()
        self._retry, self._cache = retry, cache
        self._journal, self._on_query = journal, on_query
        self._functions = Functions()
        self.progress = Progress(plan, self._function_done, self._function)
        self._readers = readers
        self._before_run = [(reader.num_shared, reader.num_tokens) for reader in readers]
        self._ready = [ReadyCalls(plan, number) for number in range(len(workers))]
        self._running: dict[asyncio.Task[None], int] = {}
        self._counts = [0] * len(workers)
        self._answers = HeldAnswers(
            plan, workers, lambda worker, answer: readers[worker].release(answer)
        )
        self._equal: dict[str, int] = {}  # the first call of a deterministic prompt
        self._followers: dict[int, list[int]] = {}
        self._waiting = [len(set(outputs.values())) for outputs in plan.outputs]
        self._wanted: dict[int, list[int]] = {}
        self._start = 0.0

    async def run(self) -> None:
        """Run until every output has a value or an error."""
        self._start = time.perf_counter()
        self._watch_outputs()
        target = self.plan.target
        warm = [] if "warm" in target.without else sorted(self.plan.cuts.static)
        is_exact = target.semantics == "exact"
        alone = repeated([] if is_exact else map(self.plan.behind_chain, self.plan.prompts))
        for reader in self._readers:
            reader.alone = alone
        try:
            await asyncio.gather(*(self._warm(reader, warm) for reader in self._readers))
            self.progress.start()
            self._take_calls()
            while self._running:
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    self._counts[self._running.pop(finished)] -= 1
                    finished.result()
                self._take_calls()
        finally:
            for running in self._running:
                running.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._free_all()
            self.stats.seconds = time.perf_counter() - self._start

    async def _warm(self, reader: SharedMessages, chains: Sequence[Key]) -> None:
        """Encode static prefixes; one that fails here is encoded by the call that needs it."""
        try:
            await reader.warm(chains)
        except Exception as error:
            if not self._retry.on(error):
                raise

    # -- which call next -------------------------------------------------------------------------

    def _take_calls(self) -> None:
        """Queue calls that became ready, and begin as many as workers take."""
        calls = self.progress.calls
        while calls:
            call = calls.popleft()
            self._ready[self.plan.worker.get(call, 0)].push(call)
        self._report()
        for worker, ready in enumerate(self._ready):
            while ready and self._counts[worker] < self.workers[worker].width:
                self._counts[worker] += 1
                task = asyncio.ensure_future(self._call(ready.pop(), worker))
                self._running[task] = worker

    def _report(self) -> None:
        """Report queries whose results have come."""
        settled = self.progress.settled
        while settled:
            task = settled.popleft()
            for query in self._wanted.pop(task, ()):
                self._waiting[query] -= 1
                if not self._waiting[query]:
                    self._answers.free_query(query)
                    self._on_query(query, self.progress)

    # -- one call --------------------------------------------------------------------------------

    async def _call(self, call: int, worker: int) -> None:
        node = self.plan.node(call)
        key = self._cache.key(node, self.progress.inputs(call))
        if key is not None and (self._fetches(call, key) or self._joins(call, key)):
            return
        begin, tried = time.perf_counter(), 0
        while True:
            tried += 1
            try:
                read = await self._reading(call, worker)
                answer = await self._readers[worker].answer(read, node.attrs["sampling"])
                break
            except Exception as error:
                wait = self._retry.seconds(error, tried)
                if wait is None:
                    wrapped = failed(node, f"{type(error).__name__}: {error}")
                    wrapped.__cause__ = error
                    self._finish(call, wrapped)
                    return
                self.stats.num_retries += 1
                if isinstance(error, MESSAGES_GONE):
                    self._lose(worker)
                await asyncio.sleep(wait)
        end = time.perf_counter()
        self._count(Lane(call, worker, begin - self._start, end - self._start, answer, tried))
        self._answers.add(call, worker, answer)
        self._cache.put(key, answer.text)
        self._finish(call, answer.text)

    def _finish(self, call: int, result: str | GraphError, origin: int | None = None) -> None:
        """Settle a call and the equal calls that wait for it; `origin`: the equal one before it."""
        for number in (call, *self._followers.pop(call, ())):
            if isinstance(result, GraphError):
                self.progress.fail(number, result)
                continue
            if self._journal is not None:
                self._journal.add(number, result)
            self.progress.complete(number, result, call if origin is None else origin)

    def _fetches(self, call: int, key: str) -> bool:
        """Settle the call from the answer cache; return whether it has the answer."""
        found, text = self._cache.get(key)
        if found:
            self.stats.num_fetched += 1
            self._finish(call, text)
        return found

    def _joins(self, call: int, key: str) -> bool:
        """Take the answer of an equal call, now or once it is there; return whether there is one.

        Calls are equal by their text, choreographed ones too, though their answers depend on more:
        equal questions have equal answers, as they have from the cache.
        """
        if "merge" in self.plan.target.without:
            return False
        first = self._equal.setdefault(key, call)
        if first == call or first in self.progress.errors:
            return False
        self.stats.num_joined += 1
        self._answers.share(first)
        if first in self.progress.values:
            self._finish(call, self.progress.values[first], first)
        else:
            self._followers.setdefault(first, []).append(call)
        return True

    async def _bring(self, call: int, worker: int, symbols: Sequence[Symbol]) -> None:
        """Move the answers that a call reads as messages to its worker, where that pays."""
        read = [n for n in symbols if isinstance(n, int) and self.plan.reads_message(call, n)]
        sources = [self.progress.origin[n] for n in read if n in self.progress.origin]
        await asyncio.gather(*(self._answers.bring(source, worker) for source in sources))

    async def _reading(self, call: int, worker: int) -> Reading:
        """Divide a call's prompt into messages and text, given which worker holds which answer."""
        before = await self._before(call, worker)
        start = 0 if before is None else len(self.plan.prompts[self.plan.goes_on[call]]) + 1
        *symbols, last = self.plan.prompts[call][start:]
        await self._bring(call, worker, symbols)
        pieces: list[Part] = []
        for symbol in symbols:
            if isinstance(symbol, int) and self.plan.reads_message(call, symbol):
                pieces.append(self._at(symbol, worker) or Told(self._told(symbol)))
            else:
                pieces.append(self._told(symbol))
        pieces.append(self._told(last))  # the header, even where it is an answer
        cuts = [cut - start for cut in self.plan.cuts.at.get(call, ()) if cut >= start]
        read, turns = reading(pieces, cuts, before), self.plan.target.turns
        return await drop_inexact_links(self.workers[worker], read, turns.ends_turn)

    async def _before(self, call: int, worker: int) -> Answer | None:
        """Answer that the call's prompt continues, if the worker can read its message so."""
        earlier, asked = self.plan.goes_on.get(call), self.workers[worker]
        if earlier is None or not asked.reads_messages:
            return None
        # Not that of an equal call: what that one has read may be freed by now.
        answer = self._answers.made_by(earlier, worker)
        if answer is None:
            return None
        prompt = self.plan.prompts[earlier]
        rest = "".join(map(self._told, self.plan.prompts[call][len(prompt) + 1 :]))
        return answer if await is_retold(asked, self._opening(prompt), answer, rest) else None

    def _opening(self, prompt: Sequence[Symbol]) -> str:
        """Text of a prompt behind its last turn: before that, texts are tokenised apart."""
        turns, texts = self.plan.target.turns, [self._told(prompt[-1])]
        for symbol in reversed(prompt[:-1]):
            if isinstance(symbol, str) and turns.ends_turn(symbol):
                break
            texts.append(self._told(symbol))
        return "".join(reversed(texts))

    def _told(self, symbol: Symbol) -> str:
        """Text of a symbol: itself, or the value of a task that is done or known."""
        if isinstance(symbol, str):
            return symbol
        known = self.plan.known
        value = known[symbol] if symbol in known else self.progress.values[symbol]
        return as_text(value, self.plan.target.turns)

    def _at(self, symbol: int, worker: int) -> Answer | None:
        """Answer from which a value comes, if the worker can read it as a message."""
        source = self.progress.origin.get(symbol)
        return None if source is None else self._answers.at(source, worker)

    # -- values ----------------------------------------------------------------------------------

    def _function(self, node: Node, inputs: list[Value]) -> Value:
        key = self._cache.key(node, inputs)
        found, value = self._cache.get(key)
        if not found:
            value = self._functions.call(node, inputs)
            self._cache.put(key, value)
        return value

    def _function_done(self, task: int, value: Value) -> None:
        if self._journal is not None:
            self._journal.add(task, value)
        self.plan.target.profile.measure(self.plan.node(task), value)

    def _count(self, lane: Lane) -> None:
        stats, answer = self.stats, lane.answer
        stats.lanes.append(lane)
        stats.num_calls += 1
        stats.num_prompt += answer.num_prompt
        stats.num_reused += answer.reused
        stats.num_encoded += answer.num_prompt - answer.reused
        stats.num_out += answer.num_out
        self.plan.target.profile.measure(self.plan.node(lane.task), answer.text, answer.num_out)

    def _lose(self, worker: int) -> None:
        """Forget a lost worker's messages: shared ones are encoded again, answers read as text."""
        self._readers[worker].forget()
        self._answers.lose(worker)

    # -- messages --------------------------------------------------------------------------------

    def _watch_outputs(self) -> None:
        """Note which queries wait for which output."""
        for query, outputs in enumerate(self.plan.outputs):
            for output in set(outputs.values()):
                self._wanted.setdefault(output, []).append(query)
        self.progress.watched = set(self._wanted)

    async def _free_all(self) -> None:
        """Free all messages of the run but the pinned ones."""
        await self._answers.free_all()
        self.stats.num_moved = self._answers.num_moved
        for reader, before in zip(self._readers, self._before_run, strict=True):
            self.stats.num_shared += reader.num_shared - before[0]
            self.stats.num_encoded += reader.num_tokens - before[1]
            with contextlib.suppress(*MESSAGES_GONE):
                await reader.free()
