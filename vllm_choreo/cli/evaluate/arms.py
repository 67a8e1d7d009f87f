# SPDX-License-Identifier: Apache-2.0
"""The ways in which a workflow is run to be judged, and what one of them makes of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vllm_choreo.cli.run.options import repair_of
from vllm_choreo.cli.run.task import Task, program_of
from vllm_choreo.errors import AdapterError
from vllm_choreo.judge.divergence import Measured, divergence
from vllm_choreo.judge.scores import CHOREOGRAPHED, TEXT, Judged
from vllm_choreo.trained_adapter import FILE_NAME, TrainedAdapter, wears_adapter
from vllm_choreo.workflows.direct import direct, question_of
from vllm_choreo.workflows.record.replay import Replay
from vllm_choreo.workflows.record.transcript import Transcript

DIRECT = "direct"


@dataclass(frozen=True)
class Arm:
    """One way of running a workflow.

    Attributes:
        name: unique.
        mode: of `Choreography`.
        adapter: its folder, or None.
        placement: which calls wear it; None: there is none.
        trained: what training wrote into the folder; None: nothing.
        is_direct: one call takes the place of the workflow: the question, and the answer.
        repair: the rule of its calls, as `Choreography` takes it; None: none.
        restates: the workflow asks its question once more after what is read.
    """

    name: str
    mode: str
    adapter: Path | None = None
    placement: str | None = None
    trained: TrainedAdapter | None = None
    is_direct: bool = False
    repair: Any = None
    restates: bool = False

    def open(self, llm: Any, task: Task | None = None) -> Any:
        """A session on an engine, for a problem."""
        from vllm_choreo.api.choreography import Choreography

        # Every run has the caching that it would have by itself.
        llm.reset_prefix_cache()
        options = {name: getattr(self, name) for name in ("adapter", "placement", "repair")}
        return Choreography(llm, self.mode, **options)

    def run(self, llm: Any, workflow: str, task: Task) -> Transcript:
        """The workflow, or the one call in its place, on a problem."""
        with self.open(llm, task) as c:
            if self.is_direct:
                question = question_of(workflow, task.inputs)
                opening, params = task.inputs.get("opening", ""), task.inputs["sampling_params"]
                return direct(c, question, opening=opening, sampling_params=params)
            inputs = {**task.inputs, "restate": True} if self.restates else task.inputs
            return program_of(workflow)(c, **inputs)

    @property
    def says_the_same(self) -> bool:
        """Whether its calls are those of the text, so that their distributions can be compared."""
        return not self.is_direct and not self.restates

    def replayed(
        self, llm: Any, workflow: str, task: Task, said: Transcript
    ) -> tuple[Transcript, list[np.ndarray]]:
        """The arm generating what a run has said, and its distributions there: see `Measured`."""
        with self.open(llm, task) as c:
            measured = Measured(c)
            with Replay(measured, said) as replay:
                ran = program_of(workflow)(replay, **task.inputs)
            return ran, measured.distributions


def arms_of(
    adapters: Sequence[Path],
    distilled: Sequence[Path],
    placement: str | None,
    repairs: Sequence[str] = (),
    *,
    restates: bool = False,
) -> list[Arm]:
    """The arms of an evaluation, in the order in which they are shown.

    Args:
        adapters: folders of those that are worn by the workflow.
        distilled: of those that are worn by the one call which takes its place.
        placement: of folders without `choreo_train.json`.
        repairs: rules, as text.
        restates: also text and choreography that ask the question once more.

    Raises:
        RepairError: a text is no rule of a session.
        AdapterError: a folder is no adapter, or does not say which calls wear it; or the one call
            would not wear a distilled one.
    """
    arms = [Arm(TEXT, "baseline"), Arm(CHOREOGRAPHED, "choreo")]
    if restates:
        arms += [replace(arm, name=f"{arm.name}, restated", restates=True) for arm in arms]
    arms += [_repaired(text) for text in dict.fromkeys(repairs)]
    arms += [_adapted(path, placement, is_direct=False) for path in adapters]
    arms += [Arm(DIRECT, "baseline", is_direct=True)]
    arms += [_adapted(path, placement, is_direct=True) for path in distilled]
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1:
            raise AdapterError(
                "two adapters have folders of this name: rename one",
                parameter="adapter",
                value=arm.adapter,
            )
    return arms


def _repaired(text: str) -> Arm:
    return Arm(f"repair {text}", "choreo", repair=repair_of(text))


def _adapted(path: Path, placement: str | None, *, is_direct: bool) -> Arm:
    trained = TrainedAdapter.load(path) if (path / FILE_NAME).exists() else None
    worn = trained.placement if trained else placement
    if worn is None:
        raise AdapterError(
            f"there is no {FILE_NAME} in the folder, which would say which calls wear the adapter: "
            "say --placement writer, reader or both",
            parameter="adapter",
            value=str(path),
        )
    if is_direct and not wears_adapter(worn, generates=True):
        raise AdapterError(
            "the one call of direct generates, which calls with this adapter do not: train it with "
            "--placement reader or both",
            parameter="direct",
            value=str(path),
        )
    name = f"{DIRECT} + {path.name}" if is_direct else f"+ {path.name}"
    return Arm(name, "choreo", path, worn, trained, is_direct)


def judge(
    llm: Any, workflow: str, task: Task, arms: Sequence[Arm], *, measures_kl: bool
) -> dict[str, Judged]:
    """What each arm makes of a problem; the text comes first.

    Raises:
        ChoreoError: one of the arms fails.
    """
    text, *others = arms
    bench = Bench(llm, workflow, task, text, task.recorded, measures_kl=measures_kl)
    return {TEXT: bench.text} | {arm.name: bench.judged(arm) for arm in others}


class Bench:
    """A problem that arms are judged on, one after the other, against one of them: the text.

    Args:
        llm: forces tokens, in this process.
        workflow: the name of its function.
        task: the problem.
        text: run at once.
        said: the run whose tokens are forced where distributions are compared; None: the text's.
        measures_kl: compare distributions at all.

    Attributes:
        text: what it made of the problem.
        said: see above.

    Raises:
        ChoreoError: the text cannot be run.
    """

    def __init__(
        self,
        llm: Any,
        workflow: str,
        task: Task,
        text: Arm,
        said: Transcript | None = None,
        *,
        measures_kl: bool = True,
    ) -> None:
        self._llm, self._workflow, self._task = llm, workflow, task
        ran = text.run(llm, workflow, task)
        self.said = said or ran
        self.text = _judged(task, ran)
        self._base: list[np.ndarray] | None = None
        if measures_kl:
            _, self._base = text.replayed(llm, workflow, task, self.said)
            self.text = replace(self.text, kl=0.0, num_tokens=sum(map(len, self._base)))

    def judged(self, arm: Arm) -> Judged:
        """What an arm makes of the problem, and how far what it says is from the text.

        Raises:
            ChoreoError: it fails.
        """
        found = _judged(self._task, arm.run(self._llm, self._workflow, self._task))
        return self._with_kl(found, arm) if self._base and arm.says_the_same else found

    def replayed(self, arm: Arm) -> Judged:
        """The same of an arm that is not asked for answers of its own: those forced are the text's.

        Raises:
            ChoreoError: it fails, or distributions are not compared.
        """
        assert self._base is not None
        ran, found = arm.replayed(self._llm, self._workflow, self._task, self.said)
        kl, num_tokens = divergence(self._base, found)
        return replace(_judged(self._task, ran), is_right=None, kl=kl, num_tokens=num_tokens)

    def _with_kl(self, judged: Judged, arm: Arm) -> Judged:
        assert self._base is not None
        _, found = arm.replayed(self._llm, self._workflow, self._task, self.said)
        kl, num_tokens = divergence(self._base, found)
        return replace(judged, kl=kl, num_tokens=num_tokens)


def _judged(task: Task, ran: Transcript) -> Judged:
    ttfts = [step.message.metrics.ttft for step in ran.decodes()]
    return Judged(
        ran.answers,
        task.is_right(ran.answers),
        num_encoded=sum(step.message.num_prefilled for step in ran.steps),
        ttft=fmean(ttfts) if ttfts else None,
    )
