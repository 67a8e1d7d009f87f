# SPDX-License-Identifier: Apache-2.0
"""Operator of a graph, and the protocols of a graph and of a batch that planning uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SOURCES = ("placeholder", "data")
# Of an operator: a text, a list of texts, or what else JSON can express. The operator's type says
# which, and is checked where a value comes in, so that it needs no check where it is used.
Value = Any


@dataclass(frozen=True)
class Node:
    """An operator of a graph.

    Attributes:
        kind, type, attrs, name, line: attributes of `Op`; names are unique in a graph.
        inputs: numbers of nodes that stand before this one.
    """

    kind: str
    type: str
    inputs: tuple[int, ...]
    attrs: Mapping[str, Any]
    name: str
    line: str

    @property
    def deterministic(self) -> bool:
        """True if the same inputs always give the same value."""
        if self.kind == "llm":
            return not self.attrs["sampling"]["temperature"]
        return self.kind != "fn" or bool(self.attrs["pure"])


class Operators(Protocol):
    """A graph; `Graph` is one."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    @property
    def outputs(self) -> Mapping[str, int]: ...


class BoundGraph(Protocol):
    """A graph whose placeholders have values; `CompiledGraph` is one."""

    @property
    def graph(self) -> Operators: ...

    @property
    def inputs(self) -> Mapping[int, Sequence[Any]]: ...

    @property
    def counts(self) -> Sequence[int | None]: ...

    @property
    def size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...
