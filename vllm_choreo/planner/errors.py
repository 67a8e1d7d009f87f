# SPDX-License-Identifier: Apache-2.0
"""Errors of graphs and of their runs, with the operator and its line."""

from __future__ import annotations

from typing import Any

from vllm_choreo.errors import ChoreoError


class GraphError(ChoreoError):
    """Refusal of a graph or of one of its operators, or a failure of its run.

    Attributes:
        op: name of the operator; "" if it is about the graph as a whole.
        line: "file:number" where the operator was written; "" if it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        line: str = "",
        parameter: str = "",
        value: object = None,
    ) -> None:
        super().__init__(message, parameter=parameter, value=value)
        self.op = op
        self.line = line

    def __str__(self) -> str:
        where = f"operator {self.op}" if self.op else "operator" if self.line else ""
        where += f" at {self.line}" if self.line else ""
        return f"{where}: {super().__str__()}" if where else super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword arguments are lost by the default pickling of exceptions.
        given = (self.message, self.op, self.line, self.parameter, self.value)
        return _rebuild, (type(self), *given)


class GraphCycleError(GraphError):
    """Operators wait for one another; repetition needs `loop`."""


class OperatorTypeError(GraphError):
    """An input has another type than the operator takes, or an argument is unknown to it."""


class UnknownPlaceholderError(GraphError):
    """An input that `compile` names is not in the graph, or one is left out."""


class BatchLengthError(GraphError):
    """The inputs of a batch do not have one value for each query."""


class ImpureFunctionError(GraphError):
    """A function that is declared pure gives two results for the same inputs."""


class OperatorFailedError(GraphError):
    """An operator raised, or its call of the model was refused; `__cause__` says why."""


class InputFailedError(GraphError):
    """An operator was not run, because one that it reads has failed."""


class JournalError(GraphError):
    """A journal is of another graph, other inputs or another model, or is damaged."""


def _rebuild(
    cls: type[GraphError], message: str, op: str, line: str, parameter: str, value: object
) -> GraphError:
    return cls(message, op=op, line=line, parameter=parameter, value=value)
