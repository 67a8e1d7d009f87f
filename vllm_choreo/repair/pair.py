# SPDX-License-Identifier: Apache-2.0
"""Cost and loss of reading another variant's messages, by the layers that are encoded anew.

A pair are two variants of one model: the *writer* has encoded messages, the *reader* reads them
(DroidSpeak, arXiv 2411.02820, 4.3). A profile holds one cell for each choice of layers that was
tried, and says which one to take.

    {"by": "profile", "format": 1, "model": {...}, "writer": null, "reader": "9f86d081...",
     "num_layers": 30, "num_read": 512.0,
     "cells": [{"layers": [[8, 20]], "quality_loss": 0.06, "ttft": 0.21, "kl": 0.004, ...}, ...],
     "target": "loss=0.1", "chosen": [[8, 20]], "measured": {...}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.layers import LayerList, Ranges, check_ranges, entries_of
from vllm_choreo.repair.measured_file import MeasuredFile
from vllm_choreo.repair.rules import ByLayers, NoTokens
from vllm_choreo.trained_adapter import ModelIdentity

_Number = Annotated[float, Meta(description="a number is needed")]
_Positive = Annotated[float, Meta(gt=0, description="a number above 0 is needed")]
_Digest = Annotated[str | None, Meta(description="a text or null is needed")]
_Model = Annotated[
    ModelIdentity,
    Meta(description="`model` of a profile has the texts name, weights, tokenizer"),
]


class Cell(Struct, frozen=True):
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

    layers: LayerList
    quality_loss: _Number
    kl: _Number
    encoded: _Number
    ttft: _Number
    kl_low: _Number | None = None
    kl_high: _Number | None = None
    accuracy: _Number | None = None
    difference: _Number | None = None

    def __post_init__(self) -> None:
        check_ranges(self.layers)

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


class PairProfile(MeasuredFile, frozen=True, tag="profile"):
    """Measurements of a pair, and the cell to be taken.

    Attributes:
        model: the base of both adapters; of two whole models the reader.
        writer, reader: hex digests of weights, of an adapter's or of a whole model's; None: calls
            use no adapter.
        num_layers: layers of the model.
        num_read: tokens that a call read, the mean of those that generated.
        cells: cells in the order in which they were measured.
        target: goal that `chosen` was to reach.
        chosen: the layers of one of the cells; None: none reaches the target.
        measured: problems and method of the measurement, for people.
        format: version of this form.
    """

    model: _Model
    writer: _Digest
    reader: _Digest
    num_layers: Annotated[int, Meta(ge=1, description="a whole number from 1 on is needed")]
    num_read: _Positive
    cells: Annotated[
        tuple[Cell, ...], Meta(min_length=1, description="one cell at least is needed")
    ]
    target: str = ""
    chosen: LayerList | None = None
    measured: Mapping[str, Any] = {}
    format: Annotated[Literal[1], Meta(description="a profile of format 1 is needed")] = 1

    def __post_init__(self) -> None:
        check_ranges(self.chosen or ())
        for layers in (*(cell.layers for cell in self.cells), self.chosen):
            if layers and layers[-1][1] > self.num_layers:
                raise RepairError(
                    f"the model has {self.num_layers} layers",
                    parameter="repair.layers",
                    value=layers,
                )

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
