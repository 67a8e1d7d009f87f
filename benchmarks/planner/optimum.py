# SPDX-License-Identifier: Apache-2.0
"""The best schedule of a few calls on one worker: a mixed-integer program, solved by HiGHS.

Variables are which call follows which, when each begins, and the total. A lower bound is proven
even where the time runs out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from vllm_choreo.planner.physical.cost import Calls, CostModel

START = -1


@dataclass(frozen=True)
class Optimum:
    """What the solver found, in token steps.

    Attributes:
        bound: no schedule is shorter.
        total: of the best schedule that it found; infinite: none in the time given.
        order: that schedule.
    """

    bound: float
    total: float
    order: list[int]

    @property
    def proven(self) -> bool:
        return self.total <= self.bound * (1 + 1e-4)


class _Rows:
    """Constraints `low <= coefficients @ x <= high`, row by row."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, row: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def constraint(self) -> LinearConstraint:
        matrix = lil_matrix((len(self.rows), self.width))
        for i, row in enumerate(self.rows):
            for column, value in row.items():
                matrix[i, column] = value
        return LinearConstraint(matrix.tocsr(), self.low, self.high)


def optimum(calls: Calls, model: CostModel, upper: float, seconds: float = 60.0) -> Optimum:
    """Solve for the order of all calls on one worker.

    Args:
        calls, model: what is scheduled, and what it costs.
        upper: the total of a schedule that is known.
        seconds: for the solver; 0: the bound of the linear relaxation alone.
    """
    program = _Program(calls, model, upper)
    bounds, constraint = program.bounds(), program.constraint()
    objective = np.zeros(program.width)
    objective[program.total] = 1.0
    relaxed = milp(objective, bounds=bounds, constraints=constraint)
    best = Optimum(max(float(relaxed.fun), program.least_total), float("inf"), [])
    if not seconds:
        return best
    integrality = np.zeros(program.width)
    integrality[: len(program.arcs)] = 1
    solved = milp(
        objective,
        integrality=integrality,
        bounds=bounds,
        constraints=constraint,
        options={"time_limit": seconds, "mip_rel_gap": 1e-5},
    )
    if solved.x is None:
        return best
    order = sorted(program.names, key=lambda j: float(solved.x[program.begins[j]]))
    return Optimum(max(best.bound, float(solved.mip_dual_bound)), float(solved.fun), order)


class _Program:
    """Its variables: an arc for each pair of calls that may follow one another (1: they do), when
    each call begins, and the total.
    """

    def __init__(self, calls: Calls, model: CostModel, upper: float) -> None:
        self.calls, self.model, self.upper = calls, model, upper
        self.names = names = sorted(calls.num_out)
        first = [START, *names]
        self.usage = {
            (i, j): calls.usage(model, None if i == START else i, j)
            for i in first
            for j in names
            if i != j
        }
        self.least = {j: min(self.usage[i, j] for i in first if i != j) for j in names}
        self.heads, self.tails = _windows(calls, model, names, self.least)
        self.latest = {j: max(upper - self.tails[j], self.heads[j]) for j in names}
        self.above = above = _ancestors(calls, names)
        # Between a call and one that must come before it, if not at once, there is a third.
        possible = [
            (i, j)
            for i, j in self.usage
            if (i not in above[j] or i in calls.depends[j]) and j not in above.get(i, ())
        ]
        self.arcs = {arc: number for number, arc in enumerate(possible)}
        self.begins = {j: len(self.arcs) + k for k, j in enumerate(names)}
        self.total = len(self.arcs) + len(names)
        self.width = self.total + 1
        self.least_total = max(self.heads[j] + self.tails[j] for j in names)
        self.into = {j: {a: 1.0 for (_, k), a in self.arcs.items() if k == j} for j in names}
        self.spent = {
            j: {a: self.usage[arc] for arc, a in self.arcs.items() if arc[1] == j} for j in names
        }
        # Who is followed at once by a call that reads it makes the worker wait.
        self.waits = {
            a: model.delay(calls.num_out[i])
            for (i, j), a in self.arcs.items()
            if i in calls.depends[j]
        }

    def bounds(self) -> Bounds:
        lower, higher = np.zeros(self.width), np.ones(self.width)
        for j, begin in self.begins.items():
            lower[begin], higher[begin] = self.heads[j], self.latest[j] + 1e-6
        lower[self.total], higher[self.total] = self.least_total, self.upper + 1e-6
        return Bounds(lower, higher)

    def constraint(self) -> LinearConstraint:
        rows = _Rows(self.width)
        self._sequence(rows)
        self._times(rows)
        self._crowds(rows)
        _tree_cuts(self.calls, self.names, self.arcs, rows)
        return rows.constraint()

    def _sequence(self, rows: _Rows) -> None:
        """Each call follows one, and is followed by at most one."""
        for j in self.names:
            rows.add(self.into[j], 1, 1)
            rows.add({a: 1.0 for (i, _), a in self.arcs.items() if i == j}, 0, 1)
        rows.add({a: 1.0 for (i, _), a in self.arcs.items() if i == START}, 1, 1)

    def _times(self, rows: _Rows) -> None:
        """A call begins after the one that it follows, and after those that it reads."""
        for j in self.names:
            row = {self.total: 1.0, self.begins[j]: -1.0, **_negated(self.spent[j])}
            rows.add(row, low=self.tails[j] - self.least[j])
            for i in self.calls.depends[j]:
                row = {self.begins[j]: 1.0, self.begins[i]: -1.0, **_negated(self.spent[i])}
                rows.add(row, low=self.model.delay(self.calls.num_out[i]))
        for (i, j), arc in self.arcs.items():
            if i != START:
                slack = self.latest[i] + self.usage[START, i] - self.heads[j]
                row = {self.begins[j]: 1.0, self.begins[i]: -1.0, **_negated(self.spent[i])}
                rows.add({**row, arc: -slack}, low=-slack)

    def _crowds(self, rows: _Rows) -> None:
        """What begins late enough, or must be followed by much, is run one after the other."""
        after = {j: self.tails[j] - self.least[j] for j in self.names}
        for h in sorted(set(self.heads.values())):
            for t in sorted(set(after.values())):
                inside = {j for j in self.names if self.heads[j] >= h and after[j] >= t}
                if inside:
                    rows.add({self.total: 1.0, **_negated(self._busy(inside))}, low=h + t)
        for k in self.names:
            for h in {self.heads[i] for i in self.above[k]}:
                inside = {i for i in self.above[k] if self.heads[i] >= h}
                delay = min(self.model.delay(self.calls.num_out[i]) for i in self.calls.depends[k])
                rows.add({self.begins[k]: 1.0, **_negated(self._busy(inside))}, low=h + delay)

    def _busy(self, inside: set[int]) -> dict[int, float]:
        """How long the worker is busy with these calls, or waits for one of them."""
        busy: dict[int, float] = {}
        for j in inside:
            busy.update(self.spent[j])
        for (i, j), arc in self.arcs.items():
            if arc in self.waits and i in inside and j in inside:
                busy[arc] += self.waits[arc]
        return busy


def _windows(
    calls: Calls, model: CostModel, names: list[int], least: dict[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """The least time before each call begins, and from then to the end of all that follows it.

    All that must come before a call, or after it, is run by the same worker, one after the other.
    """
    above = _ancestors(calls, names)
    below = {j: {k for k in names if j in above[k]} for j in names}
    delay = {j: model.delay(calls.num_out[j]) for j in names}
    heads: dict[int, float] = {}
    for j in names:
        path = [heads[i] + least[i] + delay[i] for i in calls.depends[j]]
        crowd = _sum_after(above[j], heads, least) + min(
            (delay[i] for i in calls.depends[j]), default=0.0
        )
        heads[j] = max([0.0, *path, crowd if above[j] else 0.0])
    tails: dict[int, float] = {}
    for j in reversed(names):
        after = {k: tails[k] - least[k] for k in below[j]}
        path = [tails[k] for k in below[j] if j in calls.depends[k]]
        tails[j] = least[j]
        if below[j]:
            tails[j] += delay[j] + max([*path, _sum_after(below[j], after, least)])
    return heads, tails


def _sum_after(members: set[int], offset: dict[int, float], least: dict[int, float]) -> float:
    """A bound for running all members on one worker, each with an offset before (or after) it."""
    best = spent = 0.0
    for j in sorted(members, key=lambda j: -offset[j]):
        spent += least[j]
        best = max(best, spent + offset[j])
    return best


def _ancestors(calls: Calls, names: list[int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for j in names:  # each call comes after those on which it depends
        found[j] = set(calls.depends[j]).union(*(found[i] for i in calls.depends[j]))
    return found


def _tree_cuts(
    calls: Calls, names: list[int], arcs: dict[tuple[int, int], int], rows: _Rows
) -> None:
    """Whoever begins with the path to a node must be entered from outside at least once."""
    members: dict[int, list[int]] = {}
    for j in names:
        for node in calls.tree.end[j].path():
            members.setdefault(id(node), []).append(j)
    for inside in {tuple(calls_inside) for calls_inside in members.values()}:
        if 1 < len(inside) < len(names):
            within = set(inside)
            cut = {a: 1.0 for (i, j), a in arcs.items() if j in within and i not in within}
            rows.add(cut, low=1.0)


def _negated(row: dict[int, float]) -> dict[int, float]:
    return {column: -value for column, value in row.items()}
