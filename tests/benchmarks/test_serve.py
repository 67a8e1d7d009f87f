# SPDX-License-Identifier: Apache-2.0
"""Sessions of the benchmark behind Ray Serve, and the batches in which one engine answers them."""

from __future__ import annotations

from collections import Counter

from benchmarks.serve.reference import _batches
from benchmarks.serve.workload import Transcript, sessions


def test_batches_have_each_turn_once_behind_those_before_it() -> None:
    work = sessions(7)
    done: Counter[int] = Counter()
    for batch in _batches(work):
        assert len({turn.num_tokens for _, turn in batch}) == 1
        for at, turn in batch:
            assert work[at].turns[done[at]] == turn
            done[at] += 1
    assert [done[at] for at in range(7)] == [len(session.turns) for session in work]


def test_a_prompt_is_all_that_a_turn_reads_in_its_order() -> None:
    (debate,) = sessions(1)
    transcript, answers = Transcript(), {}
    for number, turn in enumerate(debate.turns):
        given = debate.turns[0].given
        parts = [given.get(name) or answers[name] for name in turn.reads]
        assert transcript.prompt(turn) == (*(t for part in parts for t in part), *turn.header)
        answers[turn.name] = (*turn.header, number, number)
        transcript.answer(turn, [number, number])
    assert {name for turn in debate.turns[3:] for name in turn.reads} >= {"0.0", "0.1", "0.2"}
