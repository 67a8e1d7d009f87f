# SPDX-License-Identifier: Apache-2.0
"""Plan of a batch, which grows pass by pass, and the target that it is made for.

    expand           operators and queries     -> tasks, known values, outputs
    restore, fetch   a journal, an answer cache -> more known values
    demand           outputs, known values     -> tasks that are needed, those that are calls
    estimate         known values, a profile   -> tokens of each operator's value
    spell_operators  the graph                 -> prompts of operators as symbols, and their tree
    choose           prompts, tokens           -> how each operator reads another one
    spell_calls      calls, choices            -> prompts of calls
    continue_chats   prompts                   -> calls that go on where another one ended
    cut              prompts                   -> ends of shared prefixes
    gather           prompts, tokens           -> calls with their costs, in a fixed order
    place            calls                     -> calls of each worker, and their times
    nest             operators, calls          -> calls in the order of their operators
    schedule         calls of each worker      -> calls in an order of their own, if that is better
    fit              calls of each worker      -> calls in blocks of queries that fit a KV cache

Each pass takes a plan and returns one that has more. Nothing that a pass has made is changed later,
but for the timetable: it gets better from `place` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_choreo.planner.logical.nodes import BoundGraph, Node, Operators, Value
from vllm_choreo.planner.logical.values import CHATML, PromptTurns
from vllm_choreo.planner.physical.cost import Calls, CostModel, Timetable
from vllm_choreo.planner.physical.profile import Profile, estimated_tokens
from vllm_choreo.planner.physical.radix import Symbol, TemplatedRadixTree


@dataclass(frozen=True)
class Target:
    """Target of a plan: semantics, workers and costs that it is made for.

    Attributes:
        semantics: "exact" or "choreo".
        num_workers: number of workers.
        cost: the cost model.
        profile: lengths of answers.
        turns: texts around the messages of a chat.
        dispatch: choice among the calls that can run: "rank" begins the one that is first in the
            order of calls; "pending" one of the query with the most of them, sequence by sequence.
        without: parts that are left out, to measure what each is worth: names of passes behind
            `demand`; "prune" and "merge" of `expand`; "warm", which encodes static prefixes first.
    """

    semantics: str = "exact"
    num_workers: int = 1
    cost: CostModel = field(default_factory=CostModel)
    profile: Profile = field(default_factory=Profile)
    turns: PromptTurns = CHATML
    dispatch: str = "rank"
    without: frozenset[str] = frozenset()


@dataclass(slots=True)
class OpTask:
    """An operator for the queries that share its value.

    Attributes:
        node: number of the operator in the graph.
        inputs: numbers of the tasks that it reads, all less than its own.
        query: number of the first query that needs it.
        row: number of the operator's row of which it is.
        num_queries: number of queries that need it.
    """

    node: int
    inputs: tuple[int, ...]
    query: int
    row: int
    num_queries: int = 1


@dataclass(frozen=True)
class Choice:
    """Way in which an operator reads another one.

    Attributes:
        how: "prefix", "message" or "again".
        costs: tokens to be encoded per call, by possible way.
        readers: number of operators whose prompts have the same prefix up to here.
    """

    how: str
    costs: Mapping[str, float]
    readers: int


@dataclass(frozen=True)
class Cuts:
    """Cuts of prompts: ends of the prefixes that are messages of their own, for several readers.

    Attributes:
        at: numbers of symbols, each the last one of such a prefix, by call.
        static: prefixes that every batch has, as texts one after the other.
    """

    at: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    static: frozenset[tuple[str, ...]] = frozenset()


@dataclass(frozen=True)
class Plan:
    """Plan of a batch on workers, as far as its passes have been run.

    Attributes:
        batch: the graph and its inputs.
        target: semantics, workers and costs that the plan is made for.
        tasks: operators for the queries that share their value, each after those that it reads.
        known: values of inputs, and those from a cache or a journal, by task.
        outputs: tasks of the results of each query, by name.
        num_fetched: tasks of models and functions whose values the cache had.
        needed: tasks that outputs may need, reached without going through known values.
        asked: tasks among them that call the model, in their order.
        sizes: estimated tokens of each operator's value.
        known_sizes: estimated tokens of each known text, by task.
        operators: symbols of each operator's prompt, of those that have calls.
        operator_tree: tree of these prompts.
        choices: ways of reading, by (operator, operator that it reads).
        prompts: symbols of each call's prompt.
        goes_on: call with whose prompt and answer the prompt of a call of an exact plan begins, by
            that call: if its message is there, it is read, with the parents that it has read.
        cuts: places at which shared prefixes of prompts end.
        keys: digest of each task's operator and inputs, whatever its number.
        calls: calls in a fixed order, with the tree of their prompts and their costs.
        table: times of the calls, and the order in which each worker runs its own; the runtime may
            take a later one that can run.
        sequences: nested sequences of operators of each worker: the calls of an inner one run query
            by query; the inner ones follow one another.
        seconds: time that planning took.
    """

    batch: BoundGraph
    target: Target
    tasks: Sequence[OpTask] = ()
    known: Mapping[int, Value] = field(default_factory=dict)
    outputs: Sequence[Mapping[str, int]] = ()
    num_fetched: int = 0
    needed: frozenset[int] = frozenset()
    asked: Sequence[int] = ()
    sizes: Sequence[float] = ()
    known_sizes: Mapping[int, float] = field(default_factory=dict)
    operators: Mapping[int, list[Symbol]] = field(default_factory=dict)
    operator_tree: TemplatedRadixTree = field(default_factory=TemplatedRadixTree)
    choices: Mapping[tuple[int, int], Choice] = field(default_factory=dict)
    prompts: Mapping[int, list[Symbol]] = field(default_factory=dict)
    goes_on: Mapping[int, int] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=Cuts)
    keys: Sequence[bytes] = ()
    calls: Calls = field(default_factory=lambda: Calls(TemplatedRadixTree(), {}, {}))
    table: Timetable = field(default_factory=lambda: Timetable({}, {}, (), {}))
    sequences: Sequence[list[list[int]]] = ()
    seconds: float = 0.0

    @property
    def graph(self) -> Operators:
        """Operators, with the names and lines that the program gave them."""
        return self.batch.graph

    @cached_property
    def worker(self) -> dict[int, int]:
        """Number of the worker of each call."""
        return {call: number for number, order in enumerate(self.table.orders) for call in order}

    @cached_property
    def rank(self) -> dict[int, int]:
        """Place of each call on its worker."""
        return {call: rank for order in self.table.orders for rank, call in enumerate(order)}

    def node(self, task: int) -> Node:
        """Operator of a task."""
        return self.batch.graph.nodes[self.tasks[task].node]

    def size(self, task: int) -> float:
        """Estimated tokens of a task's value."""
        known = self.known_sizes.get(task)
        return self.sizes[self.tasks[task].node] if known is None else known

    def weigh(self, symbol: Symbol) -> float:
        """Estimated tokens of a symbol: of a text, or of a task's value."""
        return estimated_tokens(symbol) if isinstance(symbol, str) else self.size(symbol)

    def reads_message(self, call: int, symbol: int) -> bool:
        """Return whether a call reads the value of another task as a message."""
        choice = self.choices.get((self.tasks[call].node, self.tasks[symbol].node))
        return choice is not None and choice.how == "message"

    def behind_chain(self, call: int) -> list[str | None]:
        """Symbols of a prompt behind its chain of shared prefixes; None: read as a message."""
        found: list[str | None] = []
        last = len(self.prompts[call]) - 1
        for i, symbol in enumerate(self.prompts[call]):
            if isinstance(symbol, str):
                found.append(symbol)
            elif i < last and self.reads_message(call, symbol):
                found.append(None)
            else:
                found.append(f"<{symbol}>")  # not known yet: the same for those that read it
        first = found.index(None) if None in found else len(found)
        links = [cut for cut in self.cuts.at.get(call, ()) if cut < first]
        return found[links[-1] + 1 :] if links else found


Pass = Callable[[Plan], Plan]
