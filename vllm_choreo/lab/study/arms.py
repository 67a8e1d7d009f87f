# SPDX-License-Identifier: Apache-2.0
"""Arms of a study: the ways in which a workflow is run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.study.divergence import Measured
from vllm_choreo.lab.workflows.direct import direct, question_of
from vllm_choreo.semantics.session_options import RepairGiven
from vllm_choreo.trained_adapter import TrainedAdapter
from vllm_choreo.transcript.transcript import Transcript

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Arm:
    """One way of running a workflow.

    Attributes:
        name: unique.
        mode: mode of `Choreography`.
        adapter: folder of its adapter, or None.
        placement: calls that use the adapter; None: there is none.
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
    repair: RepairGiven = None
    restates: bool = False

    def open(self, llm: LLM, task: Task | None = None) -> AbstractContextManager[Facade]:
        """Open a session on an engine, for a problem."""
        return self._session(llm)

    def _session(self, llm: LLM) -> SessionFacade:
        from vllm_choreo.api.choreography import Choreography

        # Every run has the caching that it would have by itself.
        llm.reset_prefix_cache()
        return Choreography(
            llm, self.mode, adapter=self.adapter, placement=self.placement, repair=self.repair
        )

    def run(self, c: Facade, workflow: str, task: Task) -> Transcript:
        """Run the workflow, or the one call in its place, in a session of `open`."""
        if self.is_direct:
            question = question_of(workflow, task.inputs)
            opening, params = task.inputs.get("opening", ""), task.inputs["sampling_params"]
            turns = task.inputs.get("turns")
            return direct(c, question, opening=opening, sampling_params=params, turns=turns)
        inputs = {**task.inputs, "restate": True} if self.restates else task.inputs
        return program_of(workflow)(c, **inputs)

    @property
    def says_the_same(self) -> bool:
        """True if its calls are those of the text, so that their distributions can be compared."""
        return not self.is_direct and not self.restates

    def replayed(
        self, c: Facade, workflow: str, task: Task, said: Transcript
    ) -> tuple[Transcript, list[np.ndarray]]:
        """Replay a run's tokens with this arm; also return its distributions, see `Measured`."""
        measured = Measured(c)
        with Replay(measured, said) as replay:
            ran = program_of(workflow)(replay, **task.inputs)
        return ran, measured.distributions
