# SPDX-License-Identifier: Apache-2.0
"""A pair of variants as arms: the reader's own encoding, and what it makes of the writer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_choreo.api.facade_wrapper import Item, SessionWrapper
from vllm_choreo.api.protocol import SessionFacade
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.repair.pair import Ranges, layers_text
from vllm_choreo.semantics.message import Message
from vllm_choreo.trained_adapter import ModelIdentity, adapter_weights

if TYPE_CHECKING:
    from vllm import LLM


class Divided(SessionWrapper):
    """A session where prefills without parents are the writer's, and all else the reader's.

    Args:
        c: a session without an adapter of its own; ends with this one.
        writer, reader: adapters, as a call takes them.
    """

    def __init__(self, c: SessionFacade, writer: str, reader: str) -> None:
        super().__init__(c)
        self._writer, self._reader = writer, reader

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return super()._prefill(
            [
                {**call, "adapter": self._reader if call.get("parents") else self._writer}
                for call in calls
            ]
        )

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return super()._decode([{**call, "adapter": self._reader} for call in calls])


@dataclass(frozen=True)
class CellArm(Arm):
    """The reader, which reads the writer's messages and encodes some layers of them anew.

    Attributes:
        writer, reader: folders of adapters; None: the model itself.
    """

    writer: Path | None = None
    reader: Path | None = None

    def open(self, llm: LLM, task: Task | None = None) -> Divided:
        model = llm.model_config.model  # the name of no adapter at all
        c = self._session(llm)
        return Divided(c, str(self.writer or model), str(self.reader or model))


@dataclass(frozen=True)
class AdapterPair:
    """Two adapters of one engine.

    Attributes:
        writer, reader: their folders; None: the model itself.
        model: folder or name of the engine's model.
    """

    writer: Path | None
    reader: Path | None
    model: str

    @property
    def text(self) -> Arm:
        """The reader's own encoding."""
        placement = None if self.reader is None else "both"
        return Arm(TEXT, "baseline", self.reader, placement)

    def arm(self, layers: Ranges) -> CellArm:
        """The arm of a cell."""
        name, rule = cell_name(layers), cell_rule(layers)
        return CellArm(name, "choreo", repair=rule, writer=self.writer, reader=self.reader)

    @property
    def names(self) -> dict[str, str]:
        """Names for the page."""
        folders = {"writer": self.writer, "reader": self.reader}
        return {name: path.name if path else "the model" for name, path in folders.items()}

    @property
    def identity(self) -> dict[str, Any]:
        """Model and weights of the adapters, as fields of a profile."""
        folders = {"writer": self.writer, "reader": self.reader}
        weights = {name: path and adapter_weights(path) for name, path in folders.items()}
        return {"model": ModelIdentity.of(self.model), **weights}


class Pair(Protocol):
    """Two variants on the reader's engine: a value of `AdapterPair` or `ModelPair`."""

    @property
    def text(self) -> Arm: ...

    def arm(self, layers: Ranges) -> Arm: ...

    @property
    def names(self) -> dict[str, str]: ...

    @property
    def identity(self) -> dict[str, Any]: ...


def cell_name(layers: Ranges) -> str:
    """Name of a cell as an arm: without layers it is what all others are to improve on."""
    return layers_text(layers) if layers else CHOREOGRAPHED


def cell_rule(layers: Ranges) -> dict[str, list[list[int]]]:
    """Rule by which the calls of a cell repair."""
    return {"layers": [list(one) for one in layers]}
