# SPDX-License-Identifier: Apache-2.0
"""Every arm on every problem, and what that says of the arms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.cli.engine import LocalEngine, first_call
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import judge
from vllm_choreo.lab.study.evaluate.arms import DIRECT
from vllm_choreo.lab.study.evaluate.results import JudgedSet, save, table
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.lab.workflows.direct import question_of

if TYPE_CHECKING:
    from vllm import LLM


def judged_sets(
    sets: Sequence[HeldOutSet], arms: Sequence[Arm], *, is_direct_asked: bool
) -> list[JudgedSet]:
    """Each set with the arms that it can have: not every workflow answers one question.

    Raises:
        ChoreoError: a direct call was asked for, and there is no question.
    """
    judged = []
    for problems in sets:
        try:
            question_of(problems.workflow, problems.tasks[0].inputs)
            is_question = problems.workflow != DIRECT
        except ChoreoError:
            if is_direct_asked:
                raise
            is_question = False
        judged.append(JudgedSet(problems, [a for a in arms if is_question or not a.is_direct]))
    return judged


def judge_all(
    llm: LLM, judged: Sequence[JudgedSet], out: Path, *, measures_kl: bool, num_together: int = 1
) -> int:
    """Judge all sets on an engine, print a table and write what was found.

    Args:
        llm: engine with forced tokens, and room for the arms' adapters.
        judged: sets, without results as yet.
        out: an existing folder.
        measures_kl: compare distributions with the text's.
        num_together: problems that are run side by side.

    Returns:
        The exit status: 0, or 1 if a problem failed.

    Raises:
        ChoreoError: an adapter does not fit the engine.
    """
    engine = LocalEngine(llm)
    errors: list[str] = []
    for arm in {arm.name: arm for one in judged for arm in one.arms}.values():
        with arm.open(llm) as c:  # what does not fit is refused once, not with every problem
            first_call(c, engine.sampling(max_tokens=4))
    try:
        for one in judged:
            _judge_set(llm, one, measures_kl, num_together, errors)
    finally:
        # After Ctrl-C too: what is complete is shown.
        complete = [one for one in judged if one.problems]
        if complete:
            print(table(save(complete, engine.facts(()), out)))
            print(f"\nOpen {out / 'index.html'}")
        for error in errors:
            print(f"vllm-choreo: {error}", file=sys.stderr)
    return 1 if errors else 0


def _judge_set(
    llm: LLM, one: JudgedSet, measures_kl: bool, num_together: int, errors: list[str]
) -> None:
    """Fill a set; append to the errors for problems that failed."""
    from tqdm import tqdm

    name, workflow, tasks, arms = one.set.name, one.set.workflow, one.set.tasks, one.arms
    total = len(tasks) * len(arms)
    with tqdm(total=total, desc=f"judging {name}", unit="run", leave=False) as bar:
        for start in range(0, len(tasks), num_together):
            some = tasks[start : start + num_together]
            found = judge(llm, workflow, some, arms, measures_kl=measures_kl, on_run=bar.update)
            for task, judged in zip(some, found, strict=True):
                if isinstance(judged, ChoreoError):
                    errors.append(f"{task.id}: {judged}")
                else:
                    one.problems.append((task, judged))
