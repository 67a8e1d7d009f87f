# SPDX-License-Identifier: Apache-2.0
"""Many programs on many engines, in processes side by side; what failed, shrunk and printed."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.engine.feature_machine.configurations import ON_V2, configuration_of
from tests.engine.feature_machine.generator import program_of
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.machine import Machine, start_machine
from tests.engine.feature_machine.on_v2 import work_on_v2
from tests.engine.feature_machine.program import Program
from tests.engine.feature_machine.shrink import shrunk

# Seeds that a process takes at a time, and after how many it goes on with another engine: one takes
# as long to start as some dozens of programs.
CHUNK, ROUND = 100, 500


@dataclass(frozen=True)
class Failure:
    """
    Attributes:
        law: what failed, in few words; of failures of one cause the same, as a rule.
        where: the traceback's last lines.
        test: the shrunk program as a test.
    """

    configuration: str
    seed: int
    law: str
    detail: str
    where: str
    test: str = ""


@dataclass
class Tally:
    """What a number of programs came to."""

    configuration: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def law_of(error: BaseException) -> str:
    """Errors of one cause have one, as a rule: a law of ours, or where an exception comes from."""
    if law := getattr(error, "law", None):
        return str(law)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "vllm_choreo" in frame.filename] or frames
    frame = ours[-1]
    return f"{type(error).__name__} in {Path(frame.filename).stem}.{frame.name}"


class Engines:
    """Engines of one process, one at a time; a new one after a program that left it in doubt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machine: Machine | None = None
        self._oracles: dict[Path, Any] = {}

    def of(self, configuration: str) -> Machine:
        """The engine of a configuration, as new."""
        machine = self._machine
        if machine is not None and machine.configuration.name == configuration:
            return machine
        self.stop()
        chosen = configuration_of(configuration)
        self._machine = start_machine(chosen, self._model(chosen.model), self._oracle, self._folder)
        return self._machine

    def stop(self) -> None:
        if self._machine is not None:
            self._machine.stop()
            self._machine = None

    def error_of(self, program: Program) -> BaseException | None:
        """Run a program; what it failed by."""
        machine = self.of(program.configuration)
        try:
            machine.run(program)
        except Exception as error:
            # What the engine itself raised leaves it in any state.
            if not isinstance(error, Broken) or not machine.recover():
                self.stop()
            return error
        return None

    def _model(self, name: str) -> Path:
        from vllm_choreo.testing.models.pictured import PICTURED_MODELS
        from vllm_choreo.testing.models.tiny import make_tiny_model

        path = self._folder / name
        if path.exists():
            return path
        if name in PICTURED_MODELS:
            return PICTURED_MODELS[name](self._folder)
        return make_tiny_model(name, self._folder)

    def _oracle(self, path: Path) -> Any:
        from tests.engine.feature_machine.shown_oracle import ShownOracle
        from tests.engine.oracle import Oracle
        from vllm_choreo.testing.models.pictured import PICTURED_MODELS

        if path not in self._oracles:
            make = ShownOracle if path.name in PICTURED_MODELS else Oracle
            self._oracles[path] = make(path)
        return self._oracles[path]


def examine(engines: Engines, program: Program, seed: int, seconds: float) -> Failure | None:
    """Run a program; if it fails, find a short one that fails likewise, for so many seconds."""
    error = engines.error_of(program)
    if error is None:
        return None
    law = law_of(error)
    lines = traceback.format_exception(error)[-4:]
    failure = Failure(program.configuration, seed, law, str(error)[:500], "".join(lines)[-1500:])
    if not seconds:
        return failure

    def fails(operations: Any) -> bool:
        found = engines.error_of(Program(program.configuration, operations))
        return found is not None and law_of(found) == law

    short = Program(program.configuration, shrunk(program.operations, fails, seconds))
    name = f"{program.configuration}_{seed}"
    return Failure(
        failure.configuration, seed, law, failure.detail, failure.where, short.as_test(name)
    )


def run_seeds(
    engines: Engines,
    configuration: str,
    seeds: Sequence[int],
    until: float,
    shrink_seconds: float,
    seen: set[str],
    ignored: Sequence[str] = (),
) -> Tally:
    """Run programs until then; of failures with one law the first is shrunk."""
    tally, start = Tally(configuration), time.monotonic()
    for seed in seeds:
        if time.monotonic() > until:
            break
        program = program_of(configuration, seed)
        before = Counter(engines.of(configuration).counts)
        failure = examine(engines, program, seed, 0)
        tally.counts += engines.of(configuration).counts - before
        if failure is not None and any(part in failure.law for part in ignored):
            tally.counts[f"ignored: {failure.law}"] += 1
        elif failure is not None:
            if failure.law not in seen and shrink_seconds:
                seen.add(failure.law)
                failure = examine(engines, program, seed, shrink_seconds) or failure
            tally.failures.append(failure)
    tally.seconds = time.monotonic() - start
    return tally


# -- processes -----------------------------------------------------------------------------------


def soak(
    configurations: Sequence[str],
    first: int,
    last: int | None,
    minutes: float,
    workers: int,
    shrink_seconds: float,
    ignored: Sequence[str] = (),
) -> Iterator[Tally]:
    """Programs of all seeds on all engines, or as many as there is time for; tallies as they come.

    Args:
        configurations: all on vLLM's model runner V2, or none.
        last: None: as long as there is time.
    """
    until = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue(2 * workers)
    results: Any = context.Queue()
    arguments = (tasks, results, until, shrink_seconds, ignored)
    is_v2 = not set(configurations).isdisjoint(ON_V2)
    target = work_on_v2 if is_v2 else work
    processes = [context.Process(target=target, args=arguments) for _ in range(workers)]
    for process in processes:
        process.start()
    num_given = num_done = 0
    pending = _tasks(configurations, first, last)
    task = next(pending, None)
    try:
        while task is not None or num_done < num_given:
            while task is not None and num_given - num_done < 2 * workers:
                if time.monotonic() > until:
                    task = None
                    break
                tasks.put(task)
                num_given += 1
                task = next(pending, None)
            if num_done < num_given:
                yield _result(results, processes)
                num_done += 1
    finally:
        for _ in processes:
            tasks.put(None)
        for process in processes:
            process.join(60)


def _result(results: Any, processes: Sequence[Any]) -> Tally:
    """The next result; whoever works must be alive."""
    while True:
        try:
            tally: Tally = results.get(timeout=5)
            return tally
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                raise RuntimeError("all processes have ended") from None


def _tasks(
    configurations: Sequence[str], first: int, last: int | None
) -> Iterator[tuple[str, range]]:
    """Some seeds on one engine after the other, then the next seeds."""
    for begin in count(first, ROUND):
        if last is not None and begin >= last:
            return
        end = begin + ROUND if last is None else min(begin + ROUND, last)
        for configuration in configurations:
            for start in range(begin, end, CHUNK):
                yield configuration, range(start, min(start + CHUNK, end))


def _task(tasks: Any) -> tuple[str, range] | None:
    """The next task; None: there are no more, or who gives them has been killed."""
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        try:
            task: tuple[str, range] | None = tasks.get(timeout=5)
            return task
        except queue.Empty:
            continue
    return None


def work(
    tasks: Any, results: Any, until: float, shrink_seconds: float, ignored: Sequence[str]
) -> None:
    """Run what is asked for, in a process of its own, until there is no more."""
    import torch

    torch.set_num_threads(1)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder))
        while (task := _task(tasks)) is not None:
            configuration, seeds = task
            results.put(
                run_seeds(engines, configuration, seeds, until, shrink_seconds, seen, ignored)
            )
        engines.stop()
