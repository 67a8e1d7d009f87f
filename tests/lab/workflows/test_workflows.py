# SPDX-License-Identifier: Apache-2.0
"""The workflows as programs: who reads what, on a choreography that only takes notes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from vllm import SamplingParams

from tests.lab.notes import Notes, message, reads
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.branch_solve_merge import branch_solve_merge, groups_of
from vllm_choreo.lab.workflows.chat import user
from vllm_choreo.lab.workflows.code_review import code_review
from vllm_choreo.lab.workflows.direct import direct
from vllm_choreo.lab.workflows.document_qa import document_qa
from vllm_choreo.lab.workflows.function_calls import ROLES as AGENTS
from vllm_choreo.lab.workflows.function_calls import function_calls
from vllm_choreo.lab.workflows.iterative_debate import is_settled, iterative_debate
from vllm_choreo.lab.workflows.multi_qa import multi_qa
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.prisoners_dilemma import (
    decision,
    payoffs,
    plans_of,
    prisoners_dilemma,
)
from vllm_choreo.lab.workflows.tree_of_thoughts import elected, tree_of_thoughts

# -- the question once more ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workflow", "told"),
    [
        (tree_of_thoughts, {"votes", "answer"}),
        (parallel_debate, {"round 2", "round 3"}),
        (iterative_debate, {"verdict 1", "verdict 2", "answer"}),
    ],
)
def test_the_question_is_asked_once_more_after_what_is_read(workflow: Any, told: set[str]) -> None:
    plain, again = (workflow(Notes(), "Why?", restate=restate) for restate in (False, True))
    turn = user("Once more, the question: Why?")
    for before, after in zip(plain.steps, again.steps, strict=True):
        begins = turn if after.stage in told else ""
        assert after.message.text == begins + before.message.text
        assert after.message.parents == before.message.parents
    assert again.inputs["restate"] is True and told <= {step.stage for step in again.steps}


# -- parallel debate -----------------------------------------------------------------------------


def test_a_debater_reads_its_role_the_question_and_all_answers_of_the_rounds_before() -> None:
    notes = Notes(*(f"{name}{number}" for number in (1, 2, 3) for name in "abc"))
    log = parallel_debate(notes, "Why?", agents=["A", "B", "C"])
    assert notes.batches == [3, 3, 3]
    assert reads(log, "round 1", "agent 2") == ["task/agent 2", "task/question"]
    second = [
        "task/agent 2",
        "task/question",
        "round 1/agent 2",
        "round 1/agent 1",
        "round 1/agent 3",
        "task/revise",
    ]
    assert reads(log, "round 2", "agent 2") == second
    assert reads(log, "round 3", "agent 2") == [
        *second,
        "round 2/agent 2",
        "round 2/agent 1",
        "round 2/agent 3",
        "task/revise",
    ]
    assert log.answers == ("a3", "b3", "c3")
    assert log.seconds > 0


def test_debaters_without_roles_begin_with_the_question() -> None:
    log = parallel_debate(Notes(), "Why?")
    assert reads(log, "round 1", "agent 3") == ["task/question"]
    assert reads(log, "round 2", "agent 3")[:2] == ["task/question", "round 1/agent 3"]
    assert len(log.decodes()) == 9


def test_as_text_a_debaters_next_prompt_begins_with_its_last_one() -> None:
    """The baseline must have all the prefix hits that the workflow allows."""
    log = parallel_debate(Notes(), "Why?", agents=["A", "B"])
    for author in ("agent 1", "agent 2"):
        before = reads(log, "round 2", author)
        after = reads(log, "round 3", author)
        assert after[: len(before) + 1] == [*before, f"round 2/{author}"]


def test_each_turn_is_a_chat_turn() -> None:
    log = parallel_debate(Notes(), "Why?", agents=["Be kind."], rounds=1)
    question, revise, role, answer = (step.message.text for step in log.steps)
    assert question == "<|im_start|>user\nWhy?<|im_end|>\n"
    assert revise.startswith("<|im_start|>user\n") and revise.endswith("<|im_end|>\n")
    assert role == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert answer == "<|im_start|>assistant\nagent 1:…"


def test_a_seed_is_varied_from_call_to_call_and_from_run_to_run() -> None:
    seeds = set()
    for seed in (0, 1):
        notes = Notes()
        params = SamplingParams(seed=seed)
        parallel_debate(notes, "Why?", sampling_params=params)
        seeds |= {given.seed for given in notes.sampling.values()}
        assert params.seed == seed
    assert len(seeds) == 2 * 9
    free = SamplingParams()
    notes = Notes()
    parallel_debate(notes, "Why?", sampling_params=free)
    assert all(given is free for given in notes.sampling.values())


# -- tree of thoughts ----------------------------------------------------------------------------


def test_voters_read_all_candidates_after_their_own_role_and_the_best_is_continued() -> None:
    notes = Notes("c1", "c2", "c3", "2", "3, not 2", "2.", "done")
    params, votes = SamplingParams(max_tokens=4), SamplingParams(max_tokens=1)
    log = tree_of_thoughts(
        notes,
        "How?",
        candidates=3,
        voters=["x", "y", "x"],
        sampling_params=params,
        vote_params=votes,
    )
    assert notes.batches == [3, 3, 1]
    candidates = [f"candidates/candidate {i}" for i in (1, 2, 3)]
    ballot = ["task/question", *candidates, "task/ballot"]
    assert reads(log, "votes", "voter 2") == ["task/voter 2", *ballot]
    assert reads(log, "votes", "voter 3")[0] == "task/voter 1", "equal roles are one message"
    assert reads(log, "answer", "answer") == ["task/question", candidates[1], "task/finish"]
    assert log.answers == ("done",)
    lengths = {s.stage: notes.sampling[s.message.id].max_tokens for s in log.decodes()}
    assert lengths == {"candidates": 4, "votes": 1, "answer": 4}


def test_identical_voters_have_one_prompt() -> None:
    notes = Notes()
    log = tree_of_thoughts(notes, "How?")
    assert notes.batches == [8, 4, 1]
    prompts = [
        (reads(log, "votes", author), message(log, "votes", author).text)
        for author in ("voter 1", "voter 2", "voter 3", "voter 4")
    ]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert prompts[0][0][0] == "task/question" and prompts[0][0][-1] == "task/ballot"


@pytest.mark.parametrize(
    ("votes", "best"),
    [
        (["1", "2", "2"], 2),
        (["2 is better than 1", "1"], 1),
        ([" 3: it is 2 times as good", "3.", "1"], 3),
        (["none", "9, no: 3"], 3),
        (["2.5 of 3", "1"], 1),
        (["0", "4", "no number", ""], 1),
        (["32", "2"], 2),
        ([], 1),
    ],
)
def test_the_first_number_of_a_candidate_counts(votes: list[str], best: int) -> None:
    assert elected(votes, 3) == best


# -- iterative debate ----------------------------------------------------------------------------


def test_turns_join_the_shared_context_and_verdicts_do_not() -> None:
    notes = Notes("a1", "n1", "CONTINUE", "a2", "n2", "continue", "a3", "n3", "42")
    log = iterative_debate(notes, "Why?")
    assert notes.batches == [1] * 9
    turns = [f"round {i}/{side}" for i in (1, 2, 3) for side in ("affirmative", "negative")]
    affirmative, negative, moderator = (
        [f"task/{who}", "task/question"] for who in ("affirmative", "negative", "moderator")
    )
    assert reads(log, "round 1", "affirmative") == affirmative
    assert reads(log, "round 1", "negative") == [*negative, *turns[:1]]
    assert reads(log, "round 3", "affirmative") == [*affirmative, *turns[:4]]
    assert reads(log, "verdict 2", "moderator") == [*moderator, *turns[:4], "task/judge"]
    assert reads(log, "answer", "moderator") == [*moderator, *turns, "task/conclude"]
    assert "verdict 3" not in log.stages(), "after the last round there is nothing to decide"
    assert log.answers == ("42",)


def test_the_moderator_can_stop_the_debate() -> None:
    verdicts = SamplingParams(max_tokens=3)
    notes = Notes("a1", "n1", "STOP: they agree", "42")
    log = iterative_debate(notes, "Why?", verdict_params=verdicts)
    assert [s.stage for s in log.decodes()] == ["round 1", "round 1", "verdict 1", "answer"]
    lengths = [notes.sampling[step.message.id] for step in log.decodes()]
    assert lengths == [None, None, verdicts, None]


@pytest.mark.parametrize(
    ("verdict", "settled"),
    [
        ("STOP", True),
        (" Stop. They do not continue", True),
        ("CONTINUE, do not stop", False),
        ("Don't stop yet", False),
        ("we should not continue", True),
        ("**stopped**", True),
        ("unstoppable", False),
        ("I agree with both", False),
        ("", False),
    ],
)
def test_a_verdict_is_its_first_word_of_either_kind(verdict: str, settled: bool) -> None:
    assert is_settled(verdict) is settled


# -- two questions, two stories --------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["baseline", "serial", "parallel"])
def test_questions_are_encoded_and_read_as_the_variant_says(variant: str) -> None:
    notes = Notes("both")
    log = multi_qa(notes, ["Who?", "And when was it?"], variant=variant)
    questions = ["questions/question 1", "questions/question 2"]
    assert reads(log, "questions", "question 1") == []
    assert "Question 1: Who?" in message(log, "questions", "question 1").text
    context = questions[:1] if variant == "baseline" else []
    assert reads(log, "questions", "question 2") == context
    assert reads(log, "answer", "answer") == questions
    longer = message(log, "questions", "question 2").num_tokens
    place = ([0, 0], longer) if variant == "parallel" else (None, None)
    assert notes.places[message(log, "answer", "answer").id] == place
    assert log.answers == ("both",)


@pytest.mark.parametrize("variant", ["baseline", "serial", "parallel"])
def test_stories_are_written_apart_and_merged_as_the_variant_says(variant: str) -> None:
    divided = " cat, dog, tree\nGroup 2: run, sit"
    notes = Notes(divided, "one", "two, which is longer", "merged")
    log = branch_solve_merge(notes, ["cat", "dog", "tree", "run", "sit"], variant=variant)
    assert notes.batches == [1, 2, 1]
    assert reads(log, "branch", "branch") == []
    first, second = (message(log, "solve", f"story {i}") for i in (1, 2))
    assert not first.parents and not second.parents
    assert "cat, dog, tree." in first.text and "run, sit." in second.text
    place = ([0, 0], second.num_tokens) if variant == "parallel" else (None, None)
    assert notes.places[message(log, "merge", "merge").id] == place
    stage = "as text" if variant == "baseline" else "solve"
    assert reads(log, "merge", "merge") == [f"{stage}/story 1", f"{stage}/story 2"]
    if variant == "baseline":
        assert reads(log, "as text", "story 2") == ["as text/story 1"]
        assert message(log, "as text", "story 2").token_ids == second.token_ids
    assert log.answers == ("merged",)


def test_each_role_reads_the_task_and_all_that_was_said_before_it() -> None:
    log = code_review(Notes("def f(): ...", " f() is None", "def f():\n    pass"), "Write f.")
    read = ["task/question"]
    for name, stage in (("coder", "code"), ("tester", "tests"), ("reviewer", "answer")):
        assert reads(log, stage, name) == [f"task/{name}", *read]
        read.append(f"{stage}/{name}")
    prompts = [step for step in log.steps if step.stage == "task"]
    assert len(prompts) == 4 and not any(step.message.parents for step in prompts)
    assert log.answers == ("def f():\n    pass",)


def test_each_role_reads_what_was_called_and_what_that_gave() -> None:
    scenario = {"id": "0", "involved_classes": ["MathAPI"], "initial_config": {}}
    replies = ("add(a=1, b=2)]", "All is done.", "]", "It is [", "Nothing.", "add(a=3, b=4)] now")
    log = function_calls(Notes(*replies), ["Add 1 and 2.", "Now 3 and 4."], scenario)
    assert log.answers == (json.dumps([[["add(a=1, b=2)"]], [["add(a=3, b=4)"]]]),)
    said = [
        *("request 1/request", "calls 1/coder", "results 1/results"),
        *("remark 1/tester", "rest 1/reviewer", "request 2/request"),
        *("calls 2/coder", "remark 2/tester", "rest 2/reviewer", "results 2/results"),
    ]
    spoken = [place for place in said if place.rpartition("/")[2] in AGENTS]
    for place in spoken:
        stage, author = place.split("/")
        before = said[: said.index(place)]
        assert reads(log, stage, author) == [f"task/{author}", "task/functions", *before]
    others = [step for step in log.steps if f"{step.stage}/{step.author}" not in spoken]
    assert len(log.steps) == len(said) + 4 and not any(step.message.parents for step in others)
    assert "add(a: float, b: float): " in message(log, "task", "functions").text
    assert 'add(a=1, b=2): {"result": 3}' in message(log, "results 1", "results").text


def test_documents_are_encoded_behind_the_instruction_and_apart() -> None:
    notes = Notes("4711")
    log = document_qa(notes, "Which?", ["one", "two", "three"], opening="It is")
    documents = [f"documents/document {i}" for i in (1, 2, 3)]
    for i in (1, 2, 3):
        assert reads(log, "documents", f"document {i}") == ["instruction/instruction"]
    assert reads(log, "answer", "answer") == ["instruction/instruction", *documents]
    assert message(log, "answer", "answer").text.endswith("assistant\nIt is4711")
    assert log.answers == ("4711",)
    with pytest.raises(ChoreoError, match="one or more"):
        document_qa(notes, "Which?", [])


def test_pasted_documents_and_the_question_are_one_turn_in_an_order_of_its_own() -> None:
    documents, orders = ["one", "two", "three"], set()
    for question in ("Which?", "Who?", "Where?", "When?"):
        log = document_qa(Notes("4711"), question, documents, pasted=True, shuffled=True)
        assert reads(log, "answer", "answer") == ["instruction/instruction"]
        text = message(log, "answer", "answer").text
        (turn,) = re.findall(r"user\n(.*)<\|im_end\|>", text, re.DOTALL)
        *order, last = turn.split("\n\n")
        assert sorted(order) == sorted(documents) and last == question
        assert log.inputs["documents"] == documents  # a replay draws the same order
        orders.add(tuple(order))
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("said", "groups"),
    [
        (" cat, run\nGroup 2: dog, tree", [["cat", "run"], ["dog", "tree"]]),
        (" Cat and tree.\n\n**Group 2**\ndog, RUN", [["cat", "tree"], ["dog", "run"]]),
        (" cat, dog\ntree, run", [["cat", "dog"], ["tree", "run"]]),
        (" cat, cat\nGroup 2: cat, run", [["cat", "dog"], ["run", "tree"]]),
        (" catalogue\nGroup 2: runs", [["cat", "tree"], ["dog", "run"]]),
        (" cat, dog, tree, run", [["cat", "dog", "tree"], ["run"]]),
        ("", [["cat", "tree"], ["dog", "run"]]),
    ],
)
def test_every_concept_is_in_the_group_that_names_it_first(
    said: str, groups: list[list[str]]
) -> None:
    assert groups_of(said, ["cat", "dog", "tree", "run"]) == groups


@pytest.mark.parametrize("workflow", [multi_qa, branch_solve_merge])
def test_an_unknown_variant_is_refused_before_any_call(workflow: Any) -> None:
    notes = Notes()
    with pytest.raises(ChoreoError, match=r"variant must be .*\(variant=text\)"):
        workflow(notes, ["a", "b"], variant="text")
    assert notes.count == 0


# -- prisoner's dilemma ----------------------------------------------------------------------------

ALICE, BOB = "rules/Alice", "rules/Bob"


def test_private_prompts_and_plans_stay_private_and_the_talk_is_heard() -> None:
    notes = Notes("pa", "pb", "a1", "b1", "a2", "b2", " cooperate", " will not cooperate")
    log = prisoners_dilemma(notes, strategies=["none", "always defect"])
    assert notes.batches == [2, 1, 1, 1, 1, 2]
    assert "you defect" in message(log, "rules", "Bob").text
    assert "you defect" not in message(log, "rules", "Alice").text
    assert reads(log, "plans", "Bob") == [BOB, "rules/rules"]
    talk = ["round 1/Alice", "round 1/Bob", "round 2/Alice", "round 2/Bob"]
    assert reads(log, "round 2", "Alice") == [ALICE, "rules/rules", "plans/Alice", *talk[:2]]
    assert reads(log, "decisions", "Bob") == [BOB, "rules/rules", "plans/Bob", *talk]
    assert log.answers == ("cooperate", "defect")
    assert payoffs(*log.answers) == (0, 5)


@pytest.mark.parametrize("leak", ["system", "plan", "none"])
def test_an_utterance_is_encoded_again_with_what_it_may_carry(leak: str) -> None:
    log = prisoners_dilemma(Notes("pa", "pb", "a1", "b1"), leak=leak, rounds=1)
    said = message(log, "round 1", "Bob")
    heard = message(log, "as heard", "Bob")
    assert heard.token_ids == said.token_ids
    carried = {"system": [BOB], "plan": ["plans/Bob"], "none": []}[leak]
    # The talk so far is what was heard of it: not even the speaker's own words carry more.
    assert reads(log, "as heard", "Bob") == [*carried, "rules/rules", "as heard/Alice"]
    assert reads(log, "round 1", "Bob")[2:] == ["plans/Bob", "as heard/Alice"]
    assert reads(log, "decisions", "Bob")[3:] == ["as heard/Alice", "round 1/Bob"]
    assert reads(log, "decisions", "Alice")[3:] == ["round 1/Alice", "as heard/Bob"]


def test_either_may_speak_first_and_bob_decides_knowing_what_he_predicted() -> None:
    notes = Notes("pa", "pb", "b1", "a1", " defect", " cooperate", " defect")
    log = prisoners_dilemma(notes, first="Bob", rounds=1, predict=True)
    assert notes.batches == [2, 1, 1, 1, 2]
    assert reads(log, "round 1", "Bob") == [BOB, "rules/rules", "plans/Bob"]
    assert reads(log, "round 1", "Alice")[3:] == ["round 1/Bob"]
    heard = ["round 1/Bob", "round 1/Alice"]
    assert reads(log, "prediction", "Bob") == [BOB, "rules/rules", "plans/Bob", *heard]
    assert reads(log, "decisions", "Bob")[3:] == [*heard, "prediction/Bob"]
    assert "prediction/Bob" not in reads(log, "decisions", "Alice")
    assert log.answers == ("cooperate", "defect", "defect")


def test_plans_of_another_game_are_read_and_all_else_is_free() -> None:
    first = prisoners_dilemma(Notes("one", "two", "a1", "b1"), rounds=1)
    notes = Notes("other a1", "other b1")
    log = prisoners_dilemma(notes, rounds=1, plans=plans_of(first), leak="plan")
    assert notes.batches == [1, 1, 2], "plans are not made"
    for name in ("Alice", "Bob"):
        assert message(log, "plans", name).text == message(first, "plans", name).text
        assert reads(log, "plans", name) == reads(first, "plans", name)
    assert message(log, "round 1", "Bob").generated_text == "other b1"
    assert plans_of(log) == plans_of(first) == log.inputs["plans"]


@pytest.mark.parametrize(
    "bad",
    [
        {"leak": "some"},
        {"strategies": ["none", "win"]},
        {"first": "Carol"},
        {"plans": [[1, 2]]},
    ],
)
def test_an_unknown_leak_or_strategy_is_refused(bad: Any) -> None:
    with pytest.raises(ChoreoError, match=next(iter(bad))):
        prisoners_dilemma(Notes(), **bad)


@pytest.mark.parametrize(
    ("text", "decided"),
    [
        (" cooperate.", "cooperate"),
        ("choose to DEFECT, not to cooperate", "defect"),
        (" will not defect", "cooperate"),
        ("won't cooperate", "defect"),
        (" would never defect", "cooperate"),
        (" am cooperating", "cooperate"),
        (" like points", "undecided"),
        ("", "undecided"),
    ],
)
def test_a_decision_is_the_first_choice_named(text: str, decided: str) -> None:
    assert decision(text) == decided


def test_payoffs_are_those_of_the_rules() -> None:
    assert payoffs("cooperate", "cooperate") == (3, 3)
    assert payoffs("defect", "cooperate") == (5, 0)
    assert payoffs("defect", "defect") == (1, 1)
    assert payoffs("undecided", "defect") is None


# -- all -------------------------------------------------------------------------------------------


def test_direct_is_one_ordinary_request() -> None:
    notes = Notes("Because.")
    log = direct(notes, "Why?")
    (step,) = log.steps
    assert step.message.parents == ()
    assert step.message.text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause."
    assert log.answers == ("Because.",)


def test_steps_are_announced_as_they_are_done() -> None:
    seen: list[str] = []
    parallel_debate(
        Notes(), "Why?", agents=["A", "B"], rounds=1, on_step=lambda step: seen.append(step.author)
    )
    assert seen == ["question", "revise", "agent 1", "agent 2", "agent 1", "agent 2"]
