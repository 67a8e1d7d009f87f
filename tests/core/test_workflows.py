# SPDX-License-Identifier: Apache-2.0
"""The workflows as programs: who reads what, on a choreography that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_choreo.message import Message, Metrics, Usage
from vllm_choreo.params import ParentSpan
from vllm_choreo.workflows.parallel_debate import parallel_debate
from vllm_choreo.workflows.transcript import Transcript
from vllm_choreo.workflows.tree_of_thoughts import elected, tree_of_thoughts


class Notes:
    """Has the interface of `Choreography`; answers the `replies` in turn, then "…"."""

    mode = "notes"

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.batches: list[int] = []
        self.sampling: dict[str, Any] = {}
        self.count = 0

    def prefill(self, tokens: Any, parents: Any = ()) -> Any:
        if isinstance(tokens, list):
            return [self._message(item["tokens"], item.get("parents", ()), "") for item in tokens]
        return self._message(tokens, parents, "")

    def decode(self, header: Any, parents: Any = (), sampling_params: Any = None) -> Any:
        many = isinstance(header, list)
        items = header if many else [{"header": header, "parents": parents}]
        self.batches.append(len(items))
        messages = []
        for item in items:
            reply = self.replies.pop(0) if self.replies else "…"
            message = self._message(item["header"], item["parents"], reply)
            self.sampling[message.id] = item.get("sampling_params", sampling_params)
            messages.append(message)
        return messages if many else messages[0]

    def _message(self, text: str, parents: Any, reply: str) -> Message:
        self.count += 1
        return Message(
            id=f"m{self.count}",
            text=text + reply,
            token_ids=(1,),
            num_tokens=1,
            position=0,
            parents=tuple(ParentSpan(parent.id) for parent in parents),
            generated_text=reply,
            generated_token_ids=(1,) if reply else (),
            logprobs=None,
            finish_reason=None,
            usage=Usage(True, 0, 0, 1),
            metrics=Metrics(submitted=0.0, waiting=None, ttft=0.0, latency=0.0),
        )


def reads(transcript: Transcript, stage: str, author: str) -> list[str]:
    """What a call read, as "stage/author" of each parent."""
    names = {step.message.id: f"{step.stage}/{step.author}" for step in transcript.steps}
    (step,) = (s for s in transcript.steps if (s.stage, s.author) == (stage, author))
    return [names[span.id] for span in step.message.parents]


def test_a_debater_reads_its_role_the_question_and_all_answers_of_the_rounds_before() -> None:
    notes = Notes(*(f"{name}{number}" for number in (1, 2, 3) for name in "abc"))
    log = parallel_debate(notes, "Why?", ["A", "B", "C"], rounds=3)
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


def test_as_text_a_debaters_next_prompt_begins_with_its_last_one() -> None:
    """The baseline must have all the prefix hits that the workflow allows."""
    log = parallel_debate(Notes(), "Why?", ["A", "B"], rounds=3)
    for author in ("agent 1", "agent 2"):
        before = reads(log, "round 2", author)
        after = reads(log, "round 3", author)
        assert after[: len(before) + 1] == [*before, f"round 2/{author}"]


def test_each_turn_is_a_chat_turn() -> None:
    log = parallel_debate(Notes(), "Why?", ["Be kind."], rounds=1)
    question, revise, role, answer = (step.message.text for step in log.steps)
    assert question == "<|im_start|>user\nWhy?<|im_end|>\n"
    assert revise.startswith("<|im_start|>user\n") and revise.endswith("<|im_end|>\n")
    assert role == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert answer == "<|im_start|>assistant\nagent 1: …"


def test_voters_read_all_candidates_after_their_own_role_and_the_best_is_continued() -> None:
    notes = Notes("c1", "c2", "c3", "2", "3, not 2", "2.", "done")
    params = SamplingParams(max_tokens=4)
    votes = SamplingParams(max_tokens=1)
    log = tree_of_thoughts(
        notes, "How?", ["x", "y", "x"], 3, sampling_params=params, vote_params=votes
    )
    assert notes.batches == [3, 3, 1]
    candidates = [f"candidates/candidate {i}" for i in (1, 2, 3)]
    assert reads(log, "votes", "voter 2") == [
        "task/voter 2",
        "task/question",
        *candidates,
        "task/ballot",
    ]
    assert reads(log, "votes", "voter 3")[0] == "task/voter 1", "equal roles are one message"
    assert reads(log, "answer", "answer") == ["task/question", candidates[1], "task/finish"]
    assert log.answers == ("done",)
    seeds = [notes.sampling[s.message.id].seed for s in log.steps if s.stage == "candidates"]
    assert seeds == [1, 2, 3] and params.seed is None
    lengths = {s.stage: notes.sampling[s.message.id].max_tokens for s in log.decodes()}
    assert lengths == {"candidates": 4, "votes": 1, "answer": 4}


@pytest.mark.parametrize(
    ("votes", "best"),
    [
        (["1", "2", "2"], 2),
        (["2 is better than 1", "1"], 1),
        (["none", "9, no: 3"], 3),
        (["0", "4", "no number", ""], 1),
        ([], 1),
    ],
)
def test_the_first_number_of_a_candidate_counts(votes: list[str], best: int) -> None:
    assert elected(votes, 3) == best


def test_steps_are_announced_as_they_are_done() -> None:
    seen: list[str] = []
    parallel_debate(Notes(), "Why?", ["A", "B"], 1, on_step=lambda step: seen.append(step.author))
    assert seen == ["question", "revise", "agent 1", "agent 2", "agent 1", "agent 2"]


def test_the_picture_shows_every_message_once(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    from vllm_choreo.picture import draw_workflows

    runs = [parallel_debate(Notes(), "Why <&?", ["A", "B"], 2) for _ in range(2)]
    trees = [tree_of_thoughts(Notes(), "How?", ["x", "y"], 2) for _ in range(2)]
    svg, png = draw_workflows([(runs[0], runs[1]), (trees[0], trees[1])], tmp_path)
    assert (svg.name, png.name) == ("workflows.svg", "workflows.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    # matplotlib writes the text of a path as a comment before it.
    text = svg.read_text()
    for author, times in (("candidate 2", 1), ("voter 1", 2), ("agent 2", 3), ("ballot", 1)):
        assert text.count(f"<!-- {author} -->") == times


def test_the_table_compares_what_was_measured() -> None:
    from vllm_choreo.demo import late_steps, rows

    def run(mode: str) -> Transcript:
        log = parallel_debate(Notes(), "Why?", ["A", "B"], 2)
        log.mode, log.seconds = mode, {"choreo": 1.0, "baseline": 2.0}[mode]
        return log

    runs = [{mode: run(mode) for mode in ("choreo", "baseline")} for _ in range(2)]
    assert {step.stage for step in late_steps(runs[0]["choreo"])} == {"round 2"}
    base, choreo = rows(runs)
    assert (base.mode, base.calls, base.encoded, base.generated) == ("baseline", 16, 16, 8)
    assert (base.seconds, choreo.seconds) == (2.0, 1.0)


def test_runs_of_different_length_are_not_compared() -> None:
    from vllm_choreo.demo import _check_comparable

    one, two = (parallel_debate(Notes(), "Why?", ["A"], rounds) for rounds in (1, 2))
    _check_comparable({"choreo": one, "baseline": one})
    with pytest.raises(AssertionError, match="same number"):
        _check_comparable({"choreo": one, "baseline": two})
