# SPDX-License-Identifier: Apache-2.0
"""Random programs across all features: every answer, every refusal, and what is left.

`make soak ARGS="--machine"` runs more of them, for as long as you like. What fails is printed as a
test that can be pasted here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.feature_machine import program as operations
from tests.engine.feature_machine.configurations import CONFIGURATIONS, ON_V2, unmet
from tests.engine.feature_machine.generator import program_of
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.machine import Machine
from tests.engine.feature_machine.program import (
    Abort,
    Call,
    Evict,
    Free,
    Load,
    Operation,
    Program,
    Read,
    Reset,
    Save,
    Settle,
    Steps,
)
from tests.engine.feature_machine.shrink import shrunk
from tests.engine.feature_machine.soak import law_of
from tests.grids import sampled
from vllm_choreo.store.block_copies import BlockCopies, PlannedCopies

MachineOf = Callable[[str], Machine]
# So many programs on each engine, a quarter of a second each.
_SEEDS = [range(4), range(4, 8), range(8, 25), *(range(n, n + 25) for n in range(25, 100, 25))]
_QUICK = ("hidden", "tight", "async", "pictures")


def run(machine: Machine, *program: Operation) -> None:
    machine.run(program)


def _run_seeds(machine: Machine, seeds: range) -> None:
    name = machine.configuration.name
    for seed in seeds:
        program = program_of(name, seed)
        try:
            machine.run(program)
        except Exception as error:
            again = f"python -m tests.engine.feature_machine --configuration {name} --seeds {seed}"
            text = f"{law_of(error)}\n{error}\nshrink it by {again}\n\n{program.as_test('found')}"
            raise AssertionError(text) from error


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name in _QUICK])
def test_programs(machine_of: MachineOf, name: str, seeds: range) -> None:
    _run_seeds(machine_of(name), seeds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", sampled(_SEEDS, 2, 2), ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in _QUICK])
def test_programs_on_all_engines(machine_of: MachineOf, name: str, seeds: range) -> None:
    _run_seeds(machine_of(name), seeds)


# -- what it has found ---------------------------------------------------------------------------


def test_what_is_too_long_to_be_read_is_saved_as_a_recipe(machine_of: MachineOf) -> None:
    run(
        machine_of("hidden"),
        Call("b", "long", (8, 638), generate=1),
        Settle(),
        Evict("b", ("long",)),
        Save("b", "x", ("long",)),
        Settle(),
    )


@pytest.mark.exhaustive
def test_what_was_evicted_with_its_state_is_saved_as_a_recipe(machine_of: MachineOf) -> None:
    """So it is encoded here, and exact, whoever has written the folder."""
    run(
        machine_of("composed ahead"),
        Call("c", "doc", (9, 1)),
        Settle(),
        Reset(),
        Save("c", "x", ("doc",)),
        Load("c", "x", suffix="2", is_foreign=True),
        Call("c", "answer", (8, 1), reads=(Read("doc2"),)),
    )


def test_a_copy_is_saved_before_what_it_is_a_copy_of(machine_of: MachineOf) -> None:
    run(
        machine_of("hidden"),
        Call("b", "doc", (0, 31)),
        Call("b", "answer", (6, 1), reads=(Read("doc", start=26, stop=31),), exact=True),
        Settle(),
        Save("b", "y", ("answer", "doc")),
        Settle(),
        Load("b", "y", suffix="2"),
    )


def test_what_is_freed_while_it_is_saved_has_lost_its_hidden_states(machine_of: MachineOf) -> None:
    run(
        machine_of("hidden"),
        Call("a", "doc", (3, 78), keep=(1,)),
        Settle(),
        Save("a", "y", ("doc",), asks=2),
        Call("a", "answer", (6, 40), reads=(Read("doc"),), generate=5),
        Steps(count=1),
        Free("a", ("doc",)),
        Steps(count=3),
    )


def test_what_was_freed_stays_until_its_last_reader_is_sealed(machine_of: MachineOf) -> None:
    run(
        machine_of("hidden"),
        Call("a", "doc", (4, 65)),
        Settle(),
        Call("a", "answer", (2, 34), reads=(Read("doc"),), generate=3),
        Steps(count=1),
        Free("a", ("doc",)),
    )


def test_what_was_reset_has_room_for_its_hidden_states_still(machine_of: MachineOf) -> None:
    """So it can be saved, and read, whatever comes after it."""
    run(
        machine_of("tight"),
        Call("a", "doc", (6, 33), keep=(1,)),
        Settle(),
        Reset(),
        Save("a", "x", ("doc",)),
        Call("a", "first", (7, 96), keep=(1, 2)),
        Call("a", "second", (7, 32), keep=(2,)),
        Settle(),
        Reset(),
        Call("a", "third", (7, 32), keep=(2,)),
        Call("a", "answer", (1, 1), reads=(Read("doc"),)),
    )


def test_who_reads_what_was_freed_needs_no_room_for_its_hidden_states(
    machine_of: MachineOf,
) -> None:
    """They were captured for a patch, which nobody waits for now."""
    m7, m8, parts = Read("m7"), Read("m8"), {"layers": [0, 2]}
    run(
        machine_of("share"),
        Call("a", "m1", (1, 64), keep=(2,)),
        Call("a", "m2", (1, 1), (Read("m1"),), keep=(1,)),
        Call("a", "m3", (2, 1), keep=(1,)),
        Call("a", "m4", (8, 1), (Read("m2"),), repair={"layers": [1, 2]}, keep=(1,)),
        Call("a", "m5", (8, 1), (Read("m2"),)),
        Call("a", "m6", (1, 55), keep=(1, 2)),
        Free("a", ("m2",)),
        Settle(),
        Call("b", "m7", (7, 1)),
        Call("b", "m8", (4, 61)),
        Call("a", "m9", (4, 64), keep=(1, 2)),
        Call("a", "m11", (1, 90), keep=(1, 2)),
        Call("b", "m12", (5, 40), (m7, m8, m7, m7), generate=3, repair=parts),
        Call("b", "m13", (0, 33), (m8, m7, m8, m8), generate=3, repair=parts, keep=(2,)),
        Settle(),
        Call("a", "m17", (3, 2), (Read("m5"),), generate=1),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("name", ["chunks", "windows"])
def test_a_patch_has_what_it_begins_with_captured_though_others_read_its_source(
    machine_of: MachineOf, name: str, steps: int
) -> None:
    """What was freed is encoded again for both, and for one of them with its hidden states."""
    run(
        machine_of(name),
        Call("a", "head", (2, 20)),
        Call("a", "doc", (1, 40), (Read("head"),), keep=(1,)),
        Call("a", "patched", (8, 20), (Read("doc"),), repair={"layers": [1, 2]}),
        Call("a", "plain", (8, 9), (Read("doc"),)),
        Free("a", ("doc",)),
        Settle(),
        Evict("a", ("patched", "plain")),
        Settle(),
        Call("a", "one", (3, 20), (Read("plain"),), generate=9),
        Steps(count=steps),
        Call("a", "other", (3, 2), (Read("patched"),), generate=2),
        Call("a", "third", (3, 2), (Read("plain"),), generate=2),
    )


def test_what_is_ready_is_not_undone_by_what_comes_after_it(machine_of: MachineOf) -> None:
    """Else two calls evict in turn what each needs, until one is refused that fits by itself."""
    part, parts = Read("m4", start=59, stop=86), {"share": 0.6, "by": "attention"}
    run(
        machine_of("chunks"),
        Call("a", "m3", (8, 90), priority=2),
        Call("a", "m4", (4, 90), new_offset=64, keep=(1,)),
        Call("a", "m5", (8, 64), priority=2),
        Call("a", "m6", (3, 33), (Read("m5"), part, Read("m3")), generate=33, priority=1),
        Call(
            "a",
            "m9",
            (7, 91),
            (Read("m3"), Read("m5"), Read("m3"), Read("m4")),
            repair={"share": 1.0, "by": "attention"},
        ),
        Call("a", "m10", (2, 38), (Read("m4"), *[Read("m5")] * 3), generate=2, repair=parts),
    )


def test_what_runs_is_not_undone_by_what_fits_only_for_now(machine_of: MachineOf) -> None:
    """A long message is encoded in parts, and what comes after it leaves the rest its room."""
    run(
        machine_of("tight"),
        Call("a", "m0", (2, 38), keep=(2,), adapter=1),
        Settle(),
        Call("a", "m1", (1, 90), adapter=2),
        Settle(),
        Evict("a", ("m0", "m1")),
        Call("a", "m2", (0, 38), (Read("m1"), Read("m1"), Read("m0")), generate=3, repair="all"),
        Call("a", "m3", (0, 40), (Read("m0"), Read("m1"), Read("m1")), generate=3, repair="all"),
        Steps(count=3),
        Call(
            "a",
            "m5",
            (2, 19),
            (Read("m3"), Read("m0")),
            repair={"reweight": [0.7, 0.9]},
            keep=(1, 2),
            adapter=1,
        ),
        Call("a", "m6", (1, 65), (Read("m2"), Read("m0")), repair={"layers": [0, 1]}, keep=(2,)),
    )


@pytest.mark.parametrize("how", [{"repair": "all"}, {"exact": True}], ids=["repair", "exact"])
def test_what_is_exact_does_not_depend_on_what_others_had_copied(
    machine_of: MachineOf, how: dict[str, Any]
) -> None:
    run(
        machine_of("windows"),
        Call("a", "doc", (2, 16)),
        Call("a", "twin", (2, 16)),
        Call("a", "other", (3, 1), reads=(Read("doc"), Read("doc")), exact=True),
        Call("a", "answer", (1, 1), reads=(Read("twin"), Read("doc")), **how),
    )


def test_what_a_patch_is_placed_over_stays_until_it_is(machine_of: MachineOf) -> None:
    """It is read by a message that is encoded again, not by the call that waits for that."""
    run(
        machine_of("drafter"),
        Call("a", "m0", (0, 90)),
        Call("a", "m1", (8, 67)),
        Call("b", "m2", (7, 40), adapter=1),
        Call(
            "b",
            "m3",
            (2, 31),
            reads=(Read("m2", start=8, stop=37), Read("m2"), Read("m2")),
            repair=(((11, 15),), (), ()),
        ),
        Call("b", "m4", (0, 96), adapter=2),
        Settle(),
        Call(
            "a",
            "m5",
            (9, 96),
            reads=(Read("m0", start=33, offset=150), Read("m1", offset=0)),
            repair=(((15, 28), (33, 45)), ((6, 37),)),
            keep=(1,),
            adapter=1,
        ),
        Call(
            "a",
            "m6",
            (6, 33),
            reads=(Read("m5"), Read("m5", offset=0)),
            repair=(((26, 82),), ((37, 55),)),
        ),
        Steps(),
        Abort("m5"),
    )


def test_what_is_encoded_anew_has_the_pictures_of_its_origin_alone(machine_of: MachineOf) -> None:
    run(
        machine_of("pictures"),
        Call("a", "doc", (1, 1)),
        Settle(),
        Call("a", "answer", (2, 1), copy_of="doc", pictures=((0, 0), (1, 2))),
    )


# -- what the machine itself promises ------------------------------------------------------------


def test_every_option_meets_every_other_one() -> None:
    assert len(CONFIGURATIONS) == 30
    assert unmet(CONFIGURATIONS) == {("async", "drafter")}
    assert not unmet({**CONFIGURATIONS, **ON_V2})


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_program_is_what_it_prints(name: str) -> None:
    for seed in range(20):
        program = program_of(name, seed)
        assert program == program_of(name, seed) != program_of(name, seed + 1)
        assert eval(repr(program), dict(vars(operations))) == program
        assert _printed(program.as_test("it")) == program


def _printed(source: str) -> Program:
    """The program that a printed test runs."""
    found: list[Program] = []
    scope: dict[str, Any] = {**vars(operations), "MachineOf": MachineOf}
    scope["run"] = lambda machine, *read: found.append(Program(machine, read))
    exec(source, scope)
    scope["test_it"](lambda name: name)
    return found[0]


def test_every_operation_and_every_option_is_drawn() -> None:
    """Some thousand programs have all of the language."""
    kinds, options = set(), set()
    for name in CONFIGURATIONS:
        for operation in (one for seed in range(60) for one in program_of(name, seed)):
            kinds.add(type(operation))
            if isinstance(operation, Call):
                fields = type(operation).__dataclass_fields__
                options |= {f for f in fields if getattr(operation, f) != fields[f].default}
    assert kinds == set(Operation.__args__)
    assert options == set(Call.__dataclass_fields__)


def test_a_planted_fault_is_found_and_shrunk(
    machine_of: MachineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back from host memory is another block's, if two were evicted at once."""
    machine = machine_of("hidden")
    take = BlockCopies.take

    def take_wrong(self: BlockCopies) -> PlannedCopies:
        copies = take(self)
        if len(copies.saves) < 2:
            return copies
        sources, targets = zip(*copies.saves, strict=True)
        return replace(copies, saves=tuple(zip(reversed(sources), targets, strict=True)))

    monkeypatch.setattr(BlockCopies, "take", take_wrong)
    program: tuple[Operation, ...] = (
        Call("a", "p", (1, 40)),
        Call("a", "q", (2, 40)),
        Call("b", "r", (3, 9)),
        Settle(),
        Evict("a", ("p", "q")),
        Steps(),
        Call("b", "s", (3, 9), (Read("r"),)),
        Settle(),
        Call("a", "t", (3, 2), (Read("p"),), generate=2),
    )

    def fails(candidate: tuple[Operation, ...]) -> bool:
        try:
            machine.run(candidate)
        except Broken:
            assert machine.recover()
            return True
        return False

    assert fails(program)
    short = shrunk(program, fails)
    assert len(short) < len(program) and not fails(())
    monkeypatch.undo()
    machine.run(program)


def test_texts_begin_alike_and_have_no_special_tokens() -> None:
    rng = random.Random(0)
    for _ in range(20):
        number, length = rng.randrange(9), rng.randint(1, 90)
        assert operations.text(number, 97)[:length] == operations.text(number, length)
        assert min(operations.text(number, 97)) >= 3
