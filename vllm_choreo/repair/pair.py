# SPDX-License-Identifier: Apache-2.0
"""Cost and loss of reading another variant's messages, by the layers that are encoded anew.

A pair are two variants of one model: the *writer* has encoded messages, the *reader* reads them
(DroidSpeak, arXiv 2411.02820, 4.3). A profile holds one cell for each choice of layers that was
tried, and says which one to take.

    {"format": 1, "model": {...}, "writer": null, "reader": "9f86d081...", "num_layers": 30,
     "cells": [{"layers": [[8, 20]], "quality_loss": 0.06, "ttft": 0.21, "kl": 0.004, ...}, ...],
     "target": "loss=0.1", "chosen": [[8, 20]], "measured": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_choreo.errors import RepairError
from vllm_choreo.files import write_text
from vllm_choreo.repair.layers import Range, entries_of
from vllm_choreo.repair.rules import ByLayers, NoTokens, rule_of
from vllm_choreo.repair.runs import as_lists
from vllm_choreo.trained_adapter import ModelIdentity

FORMAT = 1
_MODEL = ("name", "weights", "tokenizer")
_NUMBERS = ("quality_loss", "kl", "ttft", "encoded")
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Cell:
    """One choice of layers, measured.

    Attributes:
        layers: ranges that the reader encodes anew; none: it reads what is stored.
        quality_loss: share that is left of the distance (KL) between plain reading and the reader's
            own encoding: 1 if no layer is encoded anew, 0 where nothing is lost.
        kl, kl_low, kl_high: KL(own encoding || this), nats per token, and its interval.
        encoded: tokens per problem that are encoded before any are generated.
        ttft: seconds, the mean of calls that generate.
        accuracy, difference: share of right answers, and its distance from the own encoding's;
            None: not measured.
    """

    layers: Ranges
    quality_loss: float
    kl: float
    encoded: float
    ttft: float
    kl_low: float | None = None
    kl_high: float | None = None
    accuracy: float | None = None
    difference: float | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers that are run."""
        return num_run(self.layers)

    @property
    def rule(self) -> ByLayers | NoTokens:
        """Rule by which a call repairs in these layers."""
        return ByLayers(self.layers) if self.layers else NoTokens()

    @property
    def name(self) -> str:
        """Layers as text, for people."""
        return layers_text(self.layers)


@dataclass(frozen=True)
class PairProfile:
    """Measurements of a pair, and the cell to be taken.

    Attributes:
        model: the base of both adapters; of two whole models the reader.
        writer, reader: hex digests of weights, of an adapter's or of a whole model's; None: calls
            wear no adapter.
        num_layers: layers of the model.
        num_read: tokens that a call read, the mean of those that generated.
        cells: cells in the order in which they were measured.
        target: goal that `chosen` was to reach.
        chosen: the layers of one of the cells; None: none reaches the target.
        measured: problems and method of the measurement, for people.
    """

    model: ModelIdentity
    writer: str | None
    reader: str | None
    num_layers: int
    num_read: float
    cells: tuple[Cell, ...]
    target: str = ""
    chosen: Ranges | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen_cell(self) -> Cell:
        """Cell that a session takes which asks for nothing else.

        Raises:
            RepairError: none reaches the target.
        """
        for cell in self.cells:
            if cell.layers == self.chosen:
                return cell
        raise RepairError(
            f"no choice of layers reaches {self.target}: encode messages anew (mode exact), or "
            "profile with another target",
            parameter="repair",
            value=self.target,
        )

    def check_model(self, served: ModelIdentity) -> None:
        """Raise RepairError unless weights and tokenizer are those of the profile."""
        if not self.model.same_as(served):
            raise RepairError(
                f"the pair was profiled with {self.model.name}; weights or tokenizer of the model "
                f"that is served, {served.name}, are others: profile with that one",
                parameter="repair",
                value=self.model.name,
            )

    def to_json(self) -> dict[str, Any]:
        """Profile as plain data, as its file holds it."""
        cells = [{**asdict(cell), "layers": _lists(cell.layers)} for cell in self.cells]
        chosen = None if self.chosen is None else _lists(self.chosen)
        return {"format": FORMAT, **asdict(self), "cells": cells, "chosen": chosen}

    def save(self, path: Path) -> None:
        """Write the file; the old one or the new one if interrupted."""
        write_text(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def from_json(cls, data: Any) -> PairProfile:
        """Make a profile of the plain data that `to_json` returns.

        Raises:
            RepairError: it is of another format; names the place.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise _refused(f"a profile of format {FORMAT} is needed", found)
        model, chosen = data.get("model"), data.get("chosen")
        if not isinstance(model, Mapping) or any(type(model.get(k)) is not str for k in _MODEL):
            raise _refused(f"`model` of a profile has the texts {', '.join(_MODEL)}", model)
        if type(data.get("num_layers")) is not int or data["num_layers"] < 1:
            raise _refused("`num_layers` of a profile is a whole number", data.get("num_layers"))
        if not _is_number(data.get("num_read")) or data["num_read"] <= 0:
            raise _refused("`num_read` of a profile is a number above 0", data.get("num_read"))
        cells = data.get("cells")
        if not isinstance(cells, list) or not cells:
            raise _refused("`cells` of a profile are a list, one at least", cells)
        return cls(
            model=ModelIdentity(**{name: model[name] for name in _MODEL}),
            writer=_digest(data, "writer"),
            reader=_digest(data, "reader"),
            num_layers=data["num_layers"],
            num_read=float(data["num_read"]),
            cells=tuple(_cell(cell, data["num_layers"]) for cell in cells),
            target=str(data.get("target", "")),
            chosen=None if chosen is None else _ranges(chosen, data["num_layers"]),
            measured=dict(data.get("measured") or {}),
        )


def pareto(cells: Sequence[Cell]) -> list[Cell]:
    """Cells for which no other runs as few layers and loses as little; by layers, fewest first."""
    best: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (cell.num_layers, cell.quality_loss)):
        if not best or cell.quality_loss < best[-1].quality_loss:
            best.append(cell)
    return best


def num_run(layers: Ranges) -> int:
    """Number of layers in the ranges."""
    return sum(stop - first for first, stop in layers)


def entries(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Layers whose hidden states messages keep, so that any of the cells can be taken."""
    return tuple(sorted({layer for cell in cells for layer in entries_of(cell.layers)}))


def layers_text(layers: Ranges) -> str:
    """Ranges as text for people; "none" if there are none."""
    return ", ".join(f"{first}–{stop}" for first, stop in layers) or "none"


def _lists(layers: Ranges) -> list[list[int]]:
    return [list(one) for one in as_lists([layers])[0]]


def _cell(data: Any, num_layers: int) -> Cell:
    if not isinstance(data, Mapping):
        raise _refused("`cells` of a profile are objects", data)
    for name in _NUMBERS:
        if not _is_number(data.get(name)):
            raise _refused(f"`{name}` of a cell is a number", data.get(name))
    optional = ("kl_low", "kl_high", "accuracy", "difference")
    for name in optional:
        if data.get(name) is not None and not _is_number(data[name]):
            raise _refused(f"`{name}` of a cell is a number or null", data[name])
    numbers = {name: data.get(name) for name in (*_NUMBERS, *optional)}
    return Cell(layers=_ranges(data.get("layers"), num_layers), **numbers)  # type: ignore[arg-type]


def _ranges(data: Any, num_layers: int) -> Ranges:
    rule = rule_of({"layers": data})
    ranges = rule.ranges if isinstance(rule, ByLayers) else ()
    if ranges and ranges[-1][1] > num_layers:
        raise _refused(f"the model has {num_layers} layers", data)
    return ranges


def _digest(data: Mapping[str, Any], name: str) -> str | None:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(f"`{name}` of a profile is a text or null", value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refused(reason: str, value: Any) -> RepairError:
    return RepairError(reason, parameter="repair", value=value)
