# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of workflows compute: scripts without an engine, and the cost model."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.harness.cost_model import CostModel
from benchmarks.workflows.__main__ import asked_problems
from benchmarks.workflows.picture import points
from tests.lab.notes import Notes
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.testing.script import Script


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def test_a_script_is_a_transcript_that_can_be_replayed() -> None:
    lengths = {"Candidate": 30, "best": 4, "Final": 7}
    script = Script(Letters(), list(map(ord, "some text without any number in it")), lengths)
    log = tree_of_thoughts(script, "How?", candidates=3, voters=["x", "y"])
    answers = [step.message.generated_text for step in log.decodes()]
    assert list(map(len, answers)) == [30] * 3 + [4] * 2 + [7]
    assert len(set(answers[:3])) == 3, "candidates differ"
    with Replay(Notes(), log) as c:
        again = tree_of_thoughts(c, "How?", candidates=3, voters=["x", "y"])
    assert [step.message.generated_text for step in again.decodes()] == answers


def test_a_point_of_the_picture_is_a_question_over_all_passes() -> None:
    seconds = {("a", "baseline"): (6, 9, 8), ("a", "choreo"): (2, 3, 8)}
    seconds |= {("b", "baseline"): (3, 3, 3), ("b", "choreo"): (2, 2, 2)}
    rows = [
        {
            "workflow": "tree of thoughts",
            "question": question,
            "side": side,
            "seconds": str(found),
            "generated_tokens": "400" if question == "a" else "100",
        }
        for (question, side), times in seconds.items()
        for found in times
    ]
    assert points(rows, "tree of thoughts") == [(100, 1.5), (400, 3.0)]
    assert points(rows, "debate") == []


def test_questions_are_added_behind_those_of_the_results() -> None:
    args = argparse.Namespace(data=None, questions=3, answer_tokens=[64, 128])
    first = asked_problems(args, [])
    assert [length for _, length in first] == [64, 128, 64]
    known = [
        {"question": problem.id, "longest_answer": str(length)} for problem, length in first[:1] * 3
    ]
    assert asked_problems(args, known)[:2] == first[1:]
    with pytest.raises(SystemExit, match="of other questions"):
        asked_problems(args, [{**known[0], "question": "algebra/7/7"}])
    with pytest.raises(SystemExit, match="of 256 tokens, too"):
        asked_problems(args, [{**known[0], "longest_answer": "256"}])


def model(*points: tuple[int, float]) -> CostModel:
    return CostModel([{"header_tokens": n, "ttft_s": seconds} for n, seconds in points])


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 4.0), (5, 6.0), (10, 12.0)]
)
def test_a_step_between_measured_lengths_is_in_proportion(num_tokens: int, seconds: float) -> None:
    assert model((3, 2.0), (1, 1.0), (5, 6.0)).step_seconds(num_tokens) == seconds


def test_a_step_takes_the_median_of_its_measurements() -> None:
    assert model((1, 9.0), (1, 1.0), (1, 2.0)).step_seconds(1) == 2.0


@pytest.mark.parametrize(("mode", "ends"), [("choreo", 2), ("baseline", 0)])
def test_calls_in_parallel_wait_for_all_their_tokens_and_the_ends_of_answers(
    mode: str, ends: int
) -> None:
    """One second per token."""
    costs = model((1, 1.0), (2, 2.0))
    log = parallel_debate(Notes(mode=mode), "Why?", agents=2, rounds=2)
    headers = 2 * len("<|im_start|>assistant\nagent 1:")
    assert costs.first_tokens(log) == [headers] * 2 + [headers + ends] * 2
    prefills = sum(step.message.num_tokens for step in log.steps[:2])
    assert costs.prefill_seconds(log) == prefills + 2 * headers + ends
