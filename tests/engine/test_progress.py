# SPDX-License-Identifier: Apache-2.0
"""Calls are all answered: none waits for ever for room that another one takes from it in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.feature_machine.generator import program_of
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.machine import Machine
from tests.engine.feature_machine.program import (
    Abort,
    Call,
    Evict,
    Operation,
    Read,
    Settle,
    Steps,
)
from tests.grids import sampled
from vllm_choreo.engine.scheduler import progress_guard, scheduler
from vllm_choreo.engine.scheduler.block_reserver import BlockReserver
from vllm_choreo.engine.scheduler.turns import Turns

MachineOf = Callable[[str], Machine]


_RANDOM_RUNS = {"share": 0.6, "by": "random", "seed": 8}
_READS = (Read("m2"), Read("m4"), Read("m4"), Read("m2"))
_RUNS = (((8, 37),), ((65, 95),), ((40, 67), (75, 85)), ((31, 38), (48, 56)))
# Two calls that had each other preempted for what they read, where none was served in turn.
_TAKEN_BACK: tuple[Operation, ...] = (
    Call("a", "m0", (0, 5)),
    Call("a", "m1", (0, 35), scores=2),
    Settle(),
    Call(
        "a",
        "m2",
        (7, 37),
        (Read("m0"), Read("m1"), Read("m1")),
        generate=1,
        keep=(1, 2),
        adapter=2,
        seed=64,
    ),
    Call("a", "m3", (0, 90), adapter=1),
    Call(
        "a",
        "m7",
        (8, 39),
        (*(Read("m2"),) * 3, Read("m1")),
        generate=5,
        repair={"share": 0.3, "by": "random", "seed": 0},
    ),
    Call(
        "a",
        "m8",
        (0, 32),
        (Read("m2"), Read("m1"), Read("m1"), Read("m2")),
        generate=1,
        repair={"layers": [0, 2]},
        adapter=2,
        seed=11,
    ),
)
# The last call is the most urgent one, and reads a message that has yet to be made.
_URGENT: tuple[Operation, ...] = (
    Call("c", "m2", (1, 65)),
    Call("c", "m3", (0, 33)),
    Call("c", "m4", (9, 96), adapter=2),
    Settle(),
    Call("b", "m5", (6, 90)),
    Evict("c", ("m3", "m4")),
    Call(
        "c",
        "m7",
        (2, 1),
        reads=(Read("m4"), Read("m4"), Read("m3")),
        repair=_RANDOM_RUNS,
        priority=2,
    ),
    Call(
        "c",
        "m8",
        (6, 65),
        reads=(Read("m2"), Read("m4"), Read("m4"), Read("m2")),
        repair=_RUNS,
        priority=1,
    ),
    Call("c", "m10", (6, 15), reads=(Read("m8"),), repair={**_RANDOM_RUNS, "share": 0.3}),
)


def run(machine: Machine, *program: Operation) -> None:
    machine.run(program)


def test_a_call_that_is_preempted_takes_nothing_from_whom_it_was_preempted_for(
    machine_of: MachineOf,
) -> None:
    """It came first, and is ready; the other has priority, and waits for what is encoded again."""
    ranges = ((), ((11, 20), (56, 84)), ((37, 82),), ((41, 50), (64, 86)))
    run(
        machine_of("async"),
        Call("c", "m0", (0, 90), priority=2),
        Call("c", "m1", (2, 32)),
        Call("c", "m2", (8, 90), new_offset=0, scores=2),
        Call("c", "m6", (2, 97), (Read("m2"), Read("m1")), repair="first:1", priority=2),
        Call("c", "m7", (1, 22), (Read("m0"),) * 4, generate=3, repair=ranges, copy_of="m6"),
    )


def test_who_runs_is_not_preempted_for_what_a_later_call_begins(machine_of: MachineOf) -> None:
    """It would start again, and take that back, for ever."""
    run(machine_of("tight"), *_TAKEN_BACK)


def test_what_an_urgent_call_waits_for_is_urgent(machine_of: MachineOf) -> None:
    """Else it is served first itself, lacks nothing that could be begun, and nobody gets on."""
    run(machine_of("adapters"), *_URGENT)


def test_what_was_half_laid_over_its_source_is_begun_anew(machine_of: MachineOf) -> None:
    """The call that it was for is aborted; one that reads its message wants it later."""
    run(
        machine_of("moved"),
        Call("c", "m0", (8, 4)),
        Call("c", "m1", (8, 59)),
        Call("c", "m3", (9, 1)),
        Call("c", "m4", (7, 96), reads=(Read("m3"), Read("m1", start=55))),
        Settle(),
        Call(
            "c",
            "m5",
            (9, 64),
            reads=(Read("m4"), Read("m1")),
            repair={"share": 0.6, "by": "random", "seed": 3},
        ),
        Call("c", "m6", (7, 31), reads=(Read("m5"), Read("m0", start=3))),
        Steps(),
        Abort("m5"),
    )


def test_calls_that_take_room_from_one_another_are_served_alone(
    machine_of: MachineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the choice that has them take nothing, the first in turn is served until it ends."""
    monkeypatch.setattr(BlockReserver, "_runs_before", lambda self, call: False)
    machine = machine_of("tight")
    run(machine, *_TAKEN_BACK)
    assert machine.counts["served alone"] == 1


@pytest.mark.parametrize("name", sampled(["tight", "adapters", "moved"], 1))
def test_calls_that_are_all_served_alone(
    machine_of: MachineOf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are the same, and none waits for what is not begun for another."""
    monkeypatch.setattr(progress_guard, "MAX_STALLED_STEPS", 0)
    machine = machine_of(name)
    for seed in range(8):
        machine.run(program_of(name, seed))
    assert machine.counts["served alone"] > 8


def test_a_call_that_waits_for_nothing_is_refused(
    machine_of: MachineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the cure that the program is for; then the others get on."""
    monkeypatch.setattr(Turns, "_pass_priority_on", lambda self, call: None)
    monkeypatch.setattr(scheduler, "_MAX_IDLE_STEPS", 50)
    with pytest.raises(Broken, match=r"m10.*unexpected error of the engine"):
        run(machine_of("adapters"), *_URGENT)
    monkeypatch.undo()
    run(machine_of("adapters"), *_URGENT)
