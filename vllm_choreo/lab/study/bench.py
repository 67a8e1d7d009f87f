# SPDX-License-Identifier: Apache-2.0
"""Judgement of arms on problems: their answers, and their distance to the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.divergence import divergence, same_calls
from vllm_choreo.lab.study.scores import TEXT, Judged
from vllm_choreo.lab.workflows.together import run_together
from vllm_choreo.transcript.transcript import Transcript

if TYPE_CHECKING:
    from vllm import LLM


def judge(
    llm: LLM,
    workflow: str,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    *,
    measures_kl: bool,
    on_run: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Judged] | ChoreoError]:
    """Judge arms on problems that are run side by side.

    Args:
        llm: engine in this process, which forces tokens.
        workflow: the name of its function.
        tasks: the problems.
        arms: the text, and others.
        measures_kl: compare distributions with the text's.
        on_run: called after each arm, with the number of problems that it was run on.

    Returns:
        For each problem the judgement of each arm, by name; or the error of one that failed.
    """
    text, *others = arms
    begin = partial(Bench, workflow=workflow, text=text, measures_kl=measures_kl)
    with text.open(llm) as c:
        begun = run_together(c, [partial(begin, task=task, said=task.recorded) for task in tasks])
    on_run(len(tasks))
    found = [one if isinstance(one, ChoreoError) else {TEXT: one.text} for one in begun]
    for arm in others:
        left = [
            (bench, judged)
            for bench, judged in zip(begun, found, strict=True)
            if isinstance(bench, Bench) and isinstance(judged, dict)
        ]
        with arm.open(llm) as c:
            results = run_together(c, [partial(bench.judged, arm=arm) for bench, _ in left])
        for (bench, judged), result in zip(left, results, strict=True):
            if isinstance(result, ChoreoError):
                found[begun.index(bench)] = result
            else:
                judged[arm.name] = result
        on_run(len(tasks))
    return found


class Bench:
    """A problem that arms are judged on, one after the other, against one of them: the text.

    Args:
        c: a session of the text's, in which it is run at once.
        workflow: the name of its function.
        task: the problem.
        text: the arm of the text.
        said: the run whose tokens are forced where distributions are compared; None: the text's.
        measures_kl: compare distributions at all.

    Attributes:
        task: see above.
        text: judgement of the text on the problem.
        said: see above.

    Raises:
        ChoreoError: the text cannot be run.
    """

    def __init__(
        self,
        c: Facade,
        workflow: str,
        task: Task,
        text: Arm,
        said: Transcript | None = None,
        *,
        measures_kl: bool = True,
    ) -> None:
        self.task, self._workflow = task, workflow
        ran = text.run(c, workflow, task)
        self.said = said or ran
        self.text = judged_run(task, ran)
        self._base: list[np.ndarray] | None = None
        if measures_kl:
            _, self._base = text.replayed(c, workflow, task, self.said)
            self.text = self._compared(self.text, self._base)

    def judged(self, c: Facade, arm: Arm) -> Judged:
        """Judge an arm's answers to the problem, and its distance to the text.

        The distance is measured in the same session: equal messages are encoded once.

        Args:
            c: a session of the arm's.

        Raises:
            ChoreoError: the arm fails.
        """
        found = judged_run(self.task, arm.run(c, self._workflow, self.task))
        if not (self._base and arm.says_the_same):
            return found
        _, said = arm.replayed(c, self._workflow, self.task, self.said)
        return self._compared(found, said)

    def replayed(self, c: Facade, arm: Arm) -> Judged:
        """Judge an arm's distance to the text alone, with the tokens of `said` forced.

        Raises:
            ChoreoError: the arm fails, or distributions are not compared.
        """
        assert self._base is not None
        ran, found = arm.replayed(c, self._workflow, self.task, self.said)
        judged = replace(judged_run(self.task, ran), is_right=None, coverage=None)
        return self._compared(judged, found)

    def _compared(self, judged: Judged, said: list[np.ndarray]) -> Judged:
        assert self._base is not None
        kl, num_tokens = divergence(self._base, said)
        roles = [step.message.role for step in self.said.decodes()]
        same = same_calls(roles, self._base, said)
        return replace(judged, kl=kl, num_tokens=num_tokens, same_calls=same)


def judged_run(task: Task, ran: Transcript) -> Judged:
    """The answers of a run, whether they are right, and what it took."""
    ttfts = [step.message.metrics.ttft for step in ran.decodes()]
    return Judged(
        ran.answers,
        task.is_right(ran.answers),
        coverage=task.coverage(ran.answers),
        num_encoded=sum(step.message.num_prefilled for step in ran.steps),
        ttft=fmean(ttfts) if ttfts else None,
    )
