# SPDX-License-Identifier: Apache-2.0
"""Profiles: how many tokens operators generate, measured on a sample of queries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_choreo.files import write_text
from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.nodes import Node, Operators, Value
from vllm_choreo.planner.logical.rows import CHOOSERS

# Of operators that were not measured: `max_tokens`, but no more than answers commonly have.
_GUESS = 128.0
_CHARS_PER_TOKEN = 4.0  # of English text in the vocabularies of current models


@dataclass
class Profile:
    """Lengths of the values of a graph's operators, by name.

    Attributes:
        num_out: mean tokens of an answer; for other operators, of their value as text.
        counts: number of values that were measured.
    """

    num_out: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_out: float) -> None:
        """Add a measurement to the mean of an operator."""
        count = self.counts.get(name, 0)
        mean = self.num_out.get(name, 0.0)
        self.num_out[name] = mean + (num_out - mean) / (count + 1)
        self.counts[name] = count + 1

    def measure(self, node: Node, value: Value, num_out: float | None = None) -> None:
        """Add a value of an operator: `num_out` tokens, or those of the value as text."""
        text = value if isinstance(value, str) else json.dumps(value)
        self.add(node.name, estimated_tokens(text) if num_out is None else num_out)

    def expected(self, graph: Operators, given: Mapping[int, float]) -> list[float]:
        """Expected tokens of each operator's value, as text; of a switch, of its longest case.

        Args:
            graph: the operators.
            given: tokens of those values that are known, by number of the operator.
        """
        found: list[float] = []
        for number, node in enumerate(graph.nodes):
            if number in given:
                found.append(given[number])
            elif node.name in self.num_out:
                found.append(self.num_out[node.name])
            elif node.kind == "llm":
                found.append(min(float(node.attrs["sampling"].get("max_tokens") or _GUESS), _GUESS))
            elif node.kind in ("switch", "output", *CHOOSERS):
                found.append(max(found[case] for case in node.inputs[node.kind == "switch" :]))
            elif node.kind in ("fmt", "chat"):
                turns = node.attrs["turns"] if node.kind == "chat" else [["", node.attrs["pieces"]]]
                pieces = [piece for _, turn in turns for piece in turn]
                found.append(sum(_piece(piece, node, found) for piece in pieces))
            else:
                found.append(_GUESS)
        return found

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        write_text(Path(path), json.dumps({"num_out": self.num_out, "counts": self.counts}))

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what `save` wrote. Raises GraphError: the file is no profile."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return Profile(dict(found["num_out"]), dict(found["counts"]))
        except (ValueError, KeyError, TypeError) as error:
            raise GraphError(
                f"this file is no profile: {error!r}", parameter="path", value=str(path)
            ) from error


def estimated_tokens(text: str) -> float:
    """Tokens of a text, estimated from its characters."""
    return len(text) / _CHARS_PER_TOKEN


def _piece(piece: str | int, node: Node, found: Sequence[float]) -> float:
    return estimated_tokens(piece) if isinstance(piece, str) else found[node.inputs[piece]]
