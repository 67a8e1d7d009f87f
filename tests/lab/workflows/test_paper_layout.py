# SPDX-License-Identifier: Apache-2.0
"""Workflows in the layout of the paper: who reads what, as its figure 6 has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.notes import Notes, message, reads
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.branch_solve_merge import branch_solve_merge
from vllm_choreo.lab.workflows.iterative_debate import iterative_debate
from vllm_choreo.lab.workflows.multi_qa import multi_qa
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.transcript.transcript import Transcript


def test_a_voter_reads_its_prompt_and_the_candidates_and_the_answer_its_own_and_the_best() -> None:
    notes = Notes("c1", "c2", "2", "2", "done")
    log = tree_of_thoughts(notes, "How?", candidates=2, voters=2, layout="paper")
    thoughts = ["candidates/candidate 1", "candidates/candidate 2"]
    assert reads(log, "candidates", "candidate 2") == ["task/question"]
    assert reads(log, "votes", "voter 1") == ["task/ballot", *thoughts]
    assert reads(log, "answer", "answer") == ["task/finish", thoughts[1]]
    for prompt in ("ballot", "finish"):
        assert reads(log, "task", prompt) == [] and "How?" in message(log, "task", prompt).text
    assert log.inputs["layout"] == "paper"


def test_the_moderator_speaks_every_round_and_its_last_verdict_is_the_answer() -> None:
    notes = Notes("a1", "n1", "CONTINUE", "a2", "n2", "CONTINUE: 42")
    log = iterative_debate(notes, "Why?", rounds=2, layout="paper")
    turns = [f"round {i}/{side}" for i in (1, 2) for side in ("affirmative", "negative")]
    assert reads(log, "round 1", "affirmative") == ["task/affirmative"]
    assert reads(log, "round 2", "negative") == ["task/negative", *turns[:3]]
    assert reads(log, "verdict 2", "moderator") == ["task/moderator", *turns]
    assert "Why?" in message(log, "task", "moderator").text
    assert log.answers == ("CONTINUE: 42",) and "answer" not in log.stages()


def test_the_moderators_first_verdict_can_be_the_answer() -> None:
    log = iterative_debate(Notes("a1", "n1", "STOP: 42"), "Why?", layout="paper")
    assert log.answers == ("STOP: 42",) and log.stages() == ["task", "round 1", "verdict 1"]


def test_nothing_is_asked_again_behind_what_the_moderator_reads() -> None:
    with pytest.raises(ChoreoError, match="restate"):
        iterative_debate(Notes(), "Why?", restate=True, layout="paper")


def test_a_debater_reads_the_others_last_round_alone() -> None:
    log = parallel_debate(Notes(), "Why?", agents=3, rounds=3, layout="paper")
    given = ["task/question", "task/revise"]
    assert reads(log, "round 1", "agent 2") == given
    others = ["round 2/agent 1", "round 2/agent 3"]
    assert reads(log, "round 3", "agent 2") == [*given, *others]


@pytest.mark.parametrize("variant", ["baseline", "serial", "parallel"])
def test_a_system_text_is_every_questions_parent(variant: str) -> None:
    notes = Notes("both")
    log = multi_qa(notes, ["Who?", "And when was it?"], variant=variant, layout="paper")
    system, questions = "system/system", ["questions/question 1", "questions/question 2"]
    assert "Answer all questions." in message(log, "system", "system").text
    assert reads(log, "questions", "question 1") == [system]
    context = questions[:1] if variant == "baseline" else []
    assert reads(log, "questions", "question 2") == [system, *context]
    assert reads(log, "answer", "answer") == [system, *questions]
    assert message(log, "answer", "answer").text == "<|im_start|>assistant\nboth"
    assert "Question 2: And" in message(log, "questions", "question 2").text
    start = message(log, "system", "system").num_tokens
    longer = message(log, "questions", "question 2").num_tokens
    beside = ([None, start, start], start + longer)
    place = beside if variant == "parallel" else (None, None)
    assert notes.places[message(log, "answer", "answer").id] == place


@pytest.mark.parametrize("variant", ["baseline", "serial", "parallel"])
def test_the_merge_is_asked_for_first_and_the_words_are_not_said_again(variant: str) -> None:
    notes = Notes(" cat\nGroup 2: dog", "one", "two", "merged")
    log = branch_solve_merge(notes, ["cat", "dog"], variant=variant, layout="paper")
    stage = "as text" if variant == "baseline" else "solve"
    stories = [f"{stage}/story 1", f"{stage}/story 2"]
    assert reads(log, "merge", "merge") == ["task/merge prompt", *stories]
    if variant == "baseline":
        assert reads(log, "as text", "story 2") == ["task/merge prompt", stories[0]]
    for stage, author in (("task", "merge prompt"), ("merge", "merge")):
        assert "cat" not in message(log, stage, author).text
    assert message(log, "merge", "merge").text == "<|im_start|>assistant\nmerged"


CALLS: dict[str, Callable[..., Transcript]] = {
    "tree_of_thoughts": tree_of_thoughts,
    "iterative_debate": iterative_debate,
    "parallel_debate": parallel_debate,
    "multi_qa": multi_qa,
    "branch_solve_merge": branch_solve_merge,
}


@pytest.mark.parametrize("workflow", CALLS)
def test_an_unknown_layout_is_refused_before_any_call(workflow: str) -> None:
    notes = Notes()
    given: Any = ["a", "b"] if workflow in ("multi_qa", "branch_solve_merge") else "Why?"
    with pytest.raises(ChoreoError, match=r"layout must be .*\(layout=text\)"):
        CALLS[workflow](notes, given, layout="text")
    assert notes.count == 0
