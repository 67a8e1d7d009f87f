# SPDX-License-Identifier: Apache-2.0
"""A pair of whole models: the writer encodes all that is given, then the reader's engine loads it.

One engine after the other, for two may not fit; what goes from one to the other are folders, as of
`save` and `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.facade_wrapper import Item, SessionWrapper
from vllm_choreo.api.protocol import SessionFacade
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.profile_pair.cell_arms import cell_name, cell_rule
from vllm_choreo.lab.study.scores import TEXT
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.repair.pair import Ranges
from vllm_choreo.semantics.message import Message
from vllm_choreo.trained_adapter import ModelIdentity

if TYPE_CHECKING:
    from vllm import LLM


class _Given(SessionWrapper):
    """A session whose prefills without parents are made by `_given`."""

    def _prefill(self, calls: list[Item]) -> list[Message]:
        return [
            super(_Given, self)._prefill([call])[0] if call.get("parents") else self._given(call)
            for call in calls
        ]

    def _given(self, call: Item) -> Message:
        raise NotImplementedError


class Writing(_Given):
    """A session that keeps prefills without parents, and their hidden states.

    Attributes:
        given: messages without parents, in order.
    """

    def __init__(self, c: SessionFacade, layers: Iterable[int]) -> None:
        super().__init__(c)
        self.given: list[Message] = []
        self._layers = list(layers)

    def _given(self, call: Item) -> Message:
        message = self._c.prefill([{**call, "keep_hidden": self._layers}])[0]
        self.given.append(message)
        return message


class Fetching(_Given):
    """A session that takes prefills without parents from a writer's folder, in order, in cycles."""

    def __init__(self, c: SessionFacade, folder: Path) -> None:
        super().__init__(c)
        self._loaded = cycle(c.load(str(folder), on_mismatch="variant", progress=False))

    def _given(self, call: Item) -> Message:
        message = next(self._loaded)
        given = call["tokens"]
        assert given == message.text or tuple(given) == message.token_ids, "programs are the same"
        return message


def write_all(
    llm: LLM, sets: Iterable[HeldOutSet], num_layers: int, folder: Path, on_run: Callable[[], None]
) -> dict[int, Path]:
    """Have the writer encode what each problem gives, and save it with all hidden states.

    Args:
        llm: the writer's engine.
        folder: parent of the folders, one for each problem.
        on_run: called after each problem.

    Returns:
        The folder of each, by the `id()` of its task.

    Raises:
        ChoreoError: a problem fails.
    """
    from vllm_choreo.api.choreography import Choreography

    folders: dict[int, Path] = {}
    for one in sets:
        for task in one.tasks:
            with Choreography(llm) as c:
                writing = Writing(c, range(1, num_layers))
                program_of(one.workflow)(writing, **task.inputs)
                folders[id(task)] = folder / str(len(folders))
                c.save(writing.given, str(folders[id(task)]), encodings=True, progress=False)
            on_run()
    return folders


@dataclass(frozen=True)
class ModelCellArm(Arm):
    """The reader, which reads the writer's messages and encodes some layers of them anew.

    Attributes:
        folders: folders of `write_all`, with what the writer has encoded.
    """

    folders: Mapping[int, Path] = field(default_factory=dict)

    def open(self, llm: LLM, task: Task | None = None) -> Fetching:
        return Fetching(self._session(llm), self.folders[id(task)])


@dataclass(frozen=True)
class ModelPair:
    """Two models that differ in their weights alone.

    Attributes:
        writer, reader: folders or names.
        folders: folders of `write_all`, with what the writer has encoded.
    """

    writer: str
    reader: str
    folders: Mapping[int, Path]

    @property
    def text(self) -> Arm:
        """The reader's own encoding."""
        return Arm(TEXT, "baseline")

    def arm(self, layers: Ranges) -> ModelCellArm:
        """The arm of a cell."""
        name, rule = cell_name(layers), cell_rule(layers)
        return ModelCellArm(name, "choreo", repair=rule, folders=self.folders)

    @property
    def names(self) -> dict[str, str]:
        """Names for the page."""
        return {
            "writer": ModelIdentity.of(self.writer).name,
            "reader": ModelIdentity.of(self.reader).name,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Model and writer's weights, as fields of a profile; the reader uses no adapter."""
        weights = ModelIdentity.of(self.writer).weights
        return {"model": ModelIdentity.of(self.reader), "writer": weights, "reader": None}
