# SPDX-License-Identifier: Apache-2.0
"""Runs of a table that are not there yet, and what all that are there say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import judged_run
from vllm_choreo.lab.study.evaluate.results import JudgedSet, save
from vllm_choreo.lab.study.results import scores_table
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.lab.study.tables.definitions import PaperTable, measured
from vllm_choreo.lab.study.tables.log import RunLog, file_digest
from vllm_choreo.lab.workflows.together import run_together
from vllm_choreo.trained_adapter import PEFT_FILES

if TYPE_CHECKING:
    from vllm import LLM

_COLUMNS = ("right", "difference", "p", "coverage", "encoded", "TTFT")
_BAR_WIDTH = 80


def run_missing(
    llm: LLM,
    table: PaperTable,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    log: RunLog,
    num_together: int,
) -> list[str]:
    """Run what the log lacks, every problem with all arms before the next one.

    Args:
        llm: engine in this process, with room for the arms' adapters.
        num_together: problems that are run side by side.

    Returns:
        Errors of runs that failed.
    """
    from tqdm import tqdm

    errors: list[str] = []
    chunks = [tasks[i : i + num_together] for i in range(0, len(tasks), num_together)]
    total = len(tasks) * len(arms)
    with tqdm(total=total, desc=table.workflow, unit="run", ncols=_BAR_WIDTH) as bar:
        for chunk in chunks:
            for arm in arms:
                name = logged_name(arm)
                left = [task for task in chunk if (task.id, name) not in log]
                if left:
                    errors += _run(llm, table.workflow, left, arm, log)
                bar.update(len(chunk))
    return errors


def _run(llm: LLM, workflow: str, tasks: Sequence[Task], arm: Arm, log: RunLog) -> list[str]:
    programs: list[Callable[[Any], Any]] = [
        partial(arm.run, workflow=workflow, task=task) for task in tasks
    ]
    with arm.open(llm) as c:
        ran = run_together(c, programs)
    errors = []
    for task, transcript in zip(tasks, ran, strict=True):
        if isinstance(transcript, ChoreoError):
            errors.append(f"{task.id}, {arm.name}: {transcript}")
        else:
            log.add(task.id, logged_name(arm), judged_run(task, transcript))
    return errors


def logged_name(arm: Arm) -> str:
    """Name of an arm in the log: with its adapter's placement and weights, which may change."""
    if arm.adapter is None:
        return arm.name
    weights = file_digest(arm.adapter / PEFT_FILES[1])
    return f"{arm.name}, {arm.placement}, {weights[:16]}"


def judged_sets(
    table: PaperTable, groups: Mapping[str, Sequence[Task]], arms: Sequence[Arm], log: RunLog
) -> list[JudgedSet]:
    """One set for each group and measure, of the problems that all arms have run."""
    sets = []
    logged = {arm.name: logged_name(arm) for arm in arms}
    for group, tasks in groups.items():
        done = [task for task in tasks if all((task.id, name) in log for name in logged.values())]
        for measure_name, measure in table.measures.items() if done else ():
            title = f"{group}; {measure_name}" if group else measure_name
            problems = [
                (
                    task,
                    {
                        arm: measured(measure, task, log[task.id, name])
                        for arm, name in logged.items()
                    },
                )
                for task in done
            ]
            sets.append(JudgedSet(HeldOutSet(title, table.workflow, tuple(done)), arms, problems))
    return sets


def write_table(sets: Sequence[JudgedSet], facts: Mapping[str, str], out: Path) -> str:
    """Write the numbers and the page of sets, at least one; return a line for each arm."""
    evaluation = save(sets, facts, out)
    return scores_table(evaluation["sets"], {"arm": "arm"}, _COLUMNS)
