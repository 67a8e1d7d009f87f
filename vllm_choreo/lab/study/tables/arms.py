# SPDX-License-Identifier: Apache-2.0
"""Columns of the tables: text, choreography with and without repositioning, adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.evaluate.arms import arms_of
from vllm_choreo.lab.study.scores import CHOREOGRAPHED
from vllm_choreo.lab.study.tables.definitions import PaperTable
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Transcript

# Workflows have their messages in a row unless they say otherwise: linearised, repositioned.
NOT_REPOSITIONED = "not repositioned"
NOTHING_LEAKS = "nothing leaks"


class NotRepositioned(FacadeWrapper):
    """A facade whose calls see every parent at the position where it was encoded.

    The new message begins behind the one that ends last. Offsets that a call gives are its own.
    Parents are whole messages, as in all workflows of this package.
    """

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return self._c.prefill([_at_their_positions(call) for call in calls])

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return self._c.decode([_at_their_positions(call) for call in calls])


def _at_their_positions(call: Item) -> Item:
    parents: Sequence[Message] = call.get("parents") or ()
    if not parents or call.get("offsets") is not None:
        return call
    ends = [parent.position + parent.num_tokens for parent in parents]
    return {
        **call,
        "offsets": [parent.position for parent in parents],
        "new_offset": call.get("new_offset", max(ends)),
    }


@dataclass(frozen=True)
class TableArm(Arm):
    """An arm of a table.

    Attributes:
        is_repositioned: messages are seen where the workflow says, and not where they were encoded.
        inputs: inputs of the workflow in place of the task's.
    """

    is_repositioned: bool = True
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, c: Facade, workflow: str, task: Task) -> Transcript:
        """Run the workflow in a session of `open`."""
        changed = replace(task, inputs={**task.inputs, **self.inputs})
        return super().run(c if self.is_repositioned else NotRepositioned(c), workflow, changed)


def table_arms(
    table: PaperTable, adapters: Sequence[Path], distilled: Sequence[Path], placement: str | None
) -> list[Arm]:
    """The arms of a table, in the order of its rows.

    Args:
        adapters, distilled, placement: see `arms_of`. One direct call is asked of mathematical
            problems alone, where the paper has it.

    Raises:
        AdapterError: see `arms_of`.
    """
    arms = arms_of(adapters, distilled, placement)
    if "right" not in table.measures:
        arms = [arm for arm in arms if not arm.is_direct]
    added: list[Arm] = [TableArm(NOT_REPOSITIONED, "choreo", is_repositioned=False)]
    if table.workflow == "prisoners_dilemma":
        added.append(TableArm(NOTHING_LEAKS, "choreo", inputs={"leak": "none"}))
    at = [arm.name for arm in arms].index(CHOREOGRAPHED) + 1
    return [*arms[:at], *added, *arms[at:]]
