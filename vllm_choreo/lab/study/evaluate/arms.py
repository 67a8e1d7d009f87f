# SPDX-License-Identifier: Apache-2.0
"""The ways in which a workflow is run to be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_choreo.errors import AdapterError
from vllm_choreo.lab.cli.options import repair_of
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.study.divergence import Measured
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.lab.workflows.direct import direct, question_of
from vllm_choreo.trained_adapter import FILE_NAME, TrainedAdapter, wears_adapter
from vllm_choreo.transcript.transcript import Transcript

DIRECT = "direct"


@dataclass(frozen=True)
class Arm:
    """One way of running a workflow.

    Attributes:
        name: unique.
        mode: mode of `Choreography`.
        adapter: folder of its adapter, or None.
        placement: calls that wear the adapter; None: there is none.
        trained: training's record in the folder; None: there is none.
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

    def run(self, c: Any, workflow: str, task: Task) -> Transcript:
        """Run the workflow, or the one call in its place, in a session of `open`."""
        if self.is_direct:
            question = question_of(workflow, task.inputs)
            opening, params = task.inputs.get("opening", ""), task.inputs["sampling_params"]
            return direct(c, question, opening=opening, sampling_params=params)
        inputs = {**task.inputs, "restate": True} if self.restates else task.inputs
        return program_of(workflow)(c, **inputs)

    @property
    def says_the_same(self) -> bool:
        """True if its calls are those of the text, so that their distributions can be compared."""
        return not self.is_direct and not self.restates

    def replayed(
        self, c: Any, workflow: str, task: Task, said: Transcript
    ) -> tuple[Transcript, list[np.ndarray]]:
        """Replay a run's tokens with this arm; also return its distributions, see `Measured`."""
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
        adapters: folders of adapters that the workflow wears.
        distilled: folders of adapters that the one call in its place wears.
        placement: placement of adapters whose folders have no `choreo_train.json`.
        repairs: rules, as text.
        restates: add text and choreography that ask the question once more.

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
