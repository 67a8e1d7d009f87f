# SPDX-License-Identifier: Apache-2.0
"""Progress of a batch: which tasks are needed, ready or done, and their values. No clock.

Tasks are run on demand, from the outputs up, so that only the chosen case of a switch is run. Calls
of the model are handed out; everything else is computed here as soon as it can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm_choreo.planner.errors import GraphError, InputFailedError
from vllm_choreo.planner.logical.nodes import Node, Value
from vllm_choreo.planner.logical.values import Functions, chosen_case, evaluate
from vllm_choreo.planner.plan import Plan


class Progress:
    """Progress of one run of a plan.

    Args:
        plan: the tasks.
        on_value: called with (task, value) of every value that a function has returned.
        functions: computes a `fn` from its node and its inputs' values; by default calls it.

    Attributes:
        values: values of the tasks that are done.
        errors: errors of the tasks that failed, or that read one that failed.
        calls: tasks that are to call the model, in the order in which they became ready; the runner
            takes them out, and calls `complete` or `fail`.
        origin: call whose answer is the value of a task, for the tasks that have one.
        watched, settled: tasks that are watched; queue of those of them that became settled.
    """

    def __init__(
        self,
        plan: Plan,
        on_value: Callable[[int, Value], None] | None = None,
        functions: Callable[[Node, list[Value]], Value] | None = None,
    ) -> None:
        self.plan = plan
        self.values: dict[int, Value] = {}
        self.errors: dict[int, GraphError] = {}
        self.calls: deque[int] = deque()
        self.origin: dict[int, int] = {}
        self.watched: set[int] = set()
        self.settled: deque[int] = deque()
        self._on_value = on_value
        self._call = functions or Functions().call
        self._missing: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._chosen: dict[int, int] = {}  # of a switch: the task that is its value
        self._todo: deque[int] = deque()

    def start(self) -> None:
        """Need all outputs, and compute what can be computed without a call."""
        for outputs in self.plan.outputs:
            for task in outputs.values():
                self._need(task)
        self._settle()

    def complete(self, task: int, value: Value, origin: int | None = None) -> None:
        """Settle a call with its answer, or with that of `origin`, an equal call."""
        self.origin[task] = task if origin is None else origin
        self._set(task, value)
        self._settle()

    def fail(self, task: int, error: GraphError) -> None:
        """Settle a call that has failed for good."""
        self._fail(task, error)
        self._settle()

    def is_settled(self, task: int) -> bool:
        """Return whether the task has a value or has failed."""
        return task in self.values or task in self.errors

    def inputs(self, task: int) -> list[Value]:
        """Values that a task reads, in the order of its inputs."""
        return [self.values[given] for given in self.plan.tasks[task].inputs]

    # -- needing ---------------------------------------------------------------------------------

    def _need(self, wanted: int) -> None:
        """Need a task and all that it reads."""
        stack = [wanted]
        while stack:
            task = stack.pop()
            if task in self._missing or self.is_settled(task):
                continue
            if task in self.plan.known:
                self._set(task, self.plan.known[task])
                continue
            inputs = self.plan.tasks[task].inputs
            if self.plan.node(task).kind == "switch":
                inputs = inputs[:1]
            stack += self._wait(task, inputs)

    def _wait(self, task: int, inputs: tuple[int, ...]) -> list[int]:
        """Have a task wait for others; return those of them that are not settled."""
        waiting = [given for given in dict.fromkeys(inputs) if not self.is_settled(given)]
        self._missing[task] = len(waiting)
        for given in waiting:
            self._readers.setdefault(given, []).append(task)
        if not waiting:
            self._todo.append(task)
        return waiting

    def _settle(self) -> None:
        """Compute what is ready, until only calls are left."""
        while self._todo:
            task = self._todo.popleft()
            if self.is_settled(task):
                continue
            broken = self._broken_input(task)
            if broken is not None:
                self._fail(task, self._input_failed(task, broken))
            elif self.plan.node(task).kind == "llm":
                self.calls.append(task)
            else:
                self._compute(task)

    def _compute(self, task: int) -> None:
        node = self.plan.node(task)
        try:
            if node.kind == "switch":
                self._switch(task, node)
            elif node.kind == "fn":
                value = self._call(node, self.inputs(task))
                if self._on_value:
                    self._on_value(task, value)
                self._set(task, value)
            else:
                if node.kind == "output":
                    self._pass_origin(task, self.plan.tasks[task].inputs[0])
                self._set(task, evaluate(node, self.inputs(task)))
        except GraphError as error:
            self._fail(task, error)

    def _switch(self, task: int, node: Node) -> None:
        inputs = self.plan.tasks[task].inputs
        if task not in self._chosen:
            chosen = inputs[chosen_case(node, self.values[inputs[0]])]
            self._chosen[task] = chosen
            for given in self._wait(task, (chosen,)):
                self._need(given)
            return
        chosen = self._chosen[task]
        self._pass_origin(task, chosen)
        self._set(task, self.values[chosen])

    def _pass_origin(self, task: int, given: int) -> None:
        if given in self.origin:
            self.origin[task] = self.origin[given]

    # -- settling --------------------------------------------------------------------------------

    def _set(self, task: int, value: Value) -> None:
        self.values[task] = value
        self._tell_readers(task)

    def _fail(self, task: int, error: GraphError) -> None:
        self.errors[task] = error
        self._tell_readers(task)

    def _tell_readers(self, task: int) -> None:
        if task in self.watched:
            self.settled.append(task)
        for reader in self._readers.pop(task, ()):
            self._missing[reader] -= 1
            # A failed input settles its readers at once: the others need not be waited for.
            if not self._missing[reader] or task in self.errors:
                self._todo.append(reader)

    def _broken_input(self, task: int) -> int | None:
        inputs = self.plan.tasks[task].inputs
        if self.plan.node(task).kind == "switch":
            inputs = (self._chosen[task],) if task in self._chosen else inputs[:1]
        return next((given for given in inputs if given in self.errors), None)

    def _input_failed(self, task: int, broken: int) -> GraphError:
        cause = self.errors[broken]
        root = cause.__cause__ if isinstance(cause, InputFailedError) else cause
        node = self.plan.node(task)
        error = InputFailedError(f"not run: {root}", op=node.name, line=node.line)
        error.__cause__ = root
        return error
